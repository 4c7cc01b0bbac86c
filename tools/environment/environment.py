"""The workshop's environment: a venv with the pinned packages and Horovod, checked with two MPI ranks.

Called by setup.py, by the venv's own Python where there is one; only the standard library is used here. Where the pins
have not changed since the last time, there is nothing to do and it ends at once.

On a cluster (`make setup SITE=polaris`) a site file that sets SITE_MPICC, the compiler of the site's MPI, makes it
another environment: on top of the site's Python, whose packages stay, with mpi4py and Horovod built for its MPI.
"""

import hashlib
import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import NoReturn

import build_horovod
import one_at_a_time

ROOT = Path(__file__).resolve().parent.parent.parent
REQUIREMENTS = ROOT / "requirements.txt"
RECIPE = 2  # one more whenever the steps below come to make another environment from the same pins

STAMP, UNFINISHED = ".workshop-ready", "unfinished"  # what the environment is made of; or its first line, meanwhile
LOCK = ".workshop-lock"
MENDED = ".torchvision-mended"  # the file that was mended
WITHOUT_HOROVOD = "without-horovod"  # why; launch.py reads it
TORCHVISION_GONE = "has a torchvision that was installed again, without the workshop's mend"
HOROVOD_MISSING = "can have Horovod now"
NOT_INSTALLED = (
    "No package was changed for good: mend the cause and run it again. Without a network, or behind a proxy: export "
    "https_proxy=http://HOST:PORT. A full disk: VENV=/roomy/place. Slow network: the CPU build of torch is smaller, "
    "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu")

# torchvision's wheel on the package index is built for CUDA. Beside a CPU torch its compiled part does not load, and
# `import torchvision` fails for want of the names of two operators. Declaring them is enough for models and data sets.
MEND = """
if not _has_ops():  # added by the workshop's set-up: see tools/environment/environment.py
    _names = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _names.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def step(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def fail(text: str) -> NoReturn:
    sys.exit(f"set-up failed: {text}")


def run(command: list[str | Path], advice: str, quiet: bool = False) -> None:
    """Run a command; where it fails, end with its last lines and the advice."""
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT if quiet else None, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout or "").splitlines()[-8:])
        fail(f"{' '.join(map(str, command))[:200]}\n{tail}\n{advice}".replace("\n\n", "\n"))


def pins() -> tuple[str, dict[str, list[str]]]:
    """The text of requirements.txt, and the requirements of it that pip skips: {"apart": [...], "built": ..., ...}."""
    text, extras = REQUIREMENTS.read_text(), {}
    for pin, extra in re.findall(r'^(\S+); extra == "(\w+)"$', text, re.M):
        extras.setdefault(extra, []).append(pin)
    return text, extras


def site_requirements(venv):
    """Two texts for pip: the pins of what the site's Python lacks, without MPI; and what it has, which is to stay."""
    site = [found for found in distributions() if not Path(found.locate_file("")).is_relative_to(venv)]
    theirs = {re.sub("[-_.]+", "-", found.name).lower(): found.version  # what comes first on the path counts
              for found in reversed(site) if found.name}
    ours = [line for line in pins()[0].splitlines() if "==" in line and not line.startswith("#")]
    without = {*theirs, "mpich", "mpi4py", *(["tensorflow-cpu"] if "tensorflow" in theirs else [])}
    return ("".join(f"{line}\n" for line in ours if line.partition("==")[0] not in without),
            "".join(f"{name}=={version}\n" for name, version in theirs.items()))


def stamp(gpu, mpicc):
    """What the environment is made of: the pins and the steps below, the site, its own Python. Not who calls."""
    others = re.compile('#|$|.*extra == "(tests|apart)"')  # add_tests.py's
    packages = "\n".join(line for line in pins()[0].splitlines() if not others.match(line))
    parts = packages, build_horovod.WRAPPER.read_text(), str(RECIPE)
    made = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"{made}\n{gpu}\n{mpicc}\n{sys.version_info.major}.{sys.version_info.minor}"


def read(path: Path) -> str:
    """The text of a file; nothing where there is none to read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def site_of(venv):
    """Horovod's GPU operations and the MPI compiler: what the site file says, else what was said the last time."""
    gpu, mpicc = (*read(venv / STAMP).split("\n"), "", "")[1:3]
    return os.environ.get("HOROVOD_GPU_OPERATIONS", gpu), os.environ.get("SITE_MPICC", mpicc)


def may_write(venv: Path) -> bool:
    """Whether this user may change the environment, or make it where there is none yet."""
    there = next(place for place in (venv, *venv.parents) if os.path.exists(place))
    return all(os.access(place, os.W_OK) for place in (there, venv / STAMP) if os.path.exists(place))


def mend_is_gone(venv):
    """Whether torchvision was mended here and is not any more."""
    place = read(venv / MENDED)
    return bool(place) and MEND not in read(Path(place))


def to_do(venv):
    """Why the environment is not ready for this checkout; None where it is."""
    before = read(venv / STAMP)
    if not before:
        return "is not there, or not ready"
    if before.startswith(UNFINISHED):
        return "is not ready: a set-up still runs, or did not end well"
    if before != stamp(*site_of(venv)):
        return "was made with other pins, for another site or by another Python"
    if mend_is_gone(venv):
        return TORCHVISION_GONE
    if read(venv / WITHOUT_HOROVOD) == build_horovod.NO_COMPILER and build_horovod.compiler() and may_write(venv):
        return HOROVOD_MISSING
    return None


def make_ready(venv: str | Path) -> None:
    """Make the environment, or what of it is not as this checkout wants it."""
    venv = Path(venv)
    reason = to_do(venv)
    if not reason:
        return
    if not may_write(venv):
        fail(f"{venv} {reason}, and you may not write there: ask its owner to run make setup in a checkout like yours, "
             "or take another place with VENV=...")
    try:
        build_horovod.processes()  # before anything is done
        venv.mkdir(parents=True, exist_ok=True)
    except (build_horovod.BuildError, OSError) as problem:
        fail(f"{problem}: for another place VENV=..." if isinstance(problem, OSError) else str(problem))
    with one_at_a_time.alone(venv / LOCK, venv) as waited:
        changed = waited or to_do(venv) != reason
        if not changed:
            {TORCHVISION_GONE: mend_torchvision, HOROVOD_MISSING: add_horovod}.get(reason, make)(venv)
    if changed:  # by another set-up: look again, as the Python that may have come
        os.execv(sys.executable, [sys.executable, Path(__file__).with_name("setup.py"), "--venv", venv])


def make(venv):
    """All steps; what is there already stays. The stamp comes last."""
    before = read(venv / STAMP)
    gpu, mpicc = site_of(venv)
    if sys.version_info >= (3, 12):
        step(f"Python {sys.version.split()[0]} is untried here (3.11 is what is tested)")
    if mpicc and before and mpicc not in before.split("\n"):
        fail(f"{venv} is a laptop's, with an MPI of its own: take another place with VENV=..., or remove it")
    if not mpicc and (venv / "constraints.txt").exists():
        fail(f"{venv} was made for a site: make setup SITE=NAME")
    (venv / STAMP).write_text(f"{UNFINISHED}\n{gpu}\n{mpicc}")  # what the site file said is kept, come what may
    make_venv(venv, mpicc)
    install_packages(venv, mpicc)
    mend_torchvision(venv)
    step("4/5 " + (f"mpi4py was compiled with {mpicc}; login nodes start no ranks" if mpicc else "two MPI ranks"))
    if not mpicc:
        run([venv / "bin" / "mpiexec", "-n", "2", own_python(venv), "-c",
             "from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 2"],
            f"MPI does not start two ranks here: does {venv}/bin/mpiexec -n 2 hostname?", quiet=True)
    add_horovod(venv)
    (venv / STAMP).write_text(stamp(gpu, mpicc))
    step(f"ready. To type commands yourself: . {os.path.relpath(venv)}/bin/activate")
    if mpicc:
        step("then, on compute nodes: submit/doctor.pbs or doctor.slurm, which starts ranks and lets them all-reduce")


def own_python(venv):
    return venv / "bin" / "python"


def make_venv(venv, mpicc):
    advice = "Python cannot make virtual environments: on Debian and Ubuntu, apt install python3-venv"
    if not own_python(venv).exists():
        step(f"1/5 a virtual environment in {venv}")
        run([sys.executable, "-m", "venv", *["--system-site-packages"] * bool(mpicc), venv], advice, quiet=True)
    if subprocess.run([own_python(venv), "-c", "import pip"], capture_output=True).returncode:  # left half made
        run([own_python(venv), "-m", "ensurepip"], advice, quiet=True)


def install_packages(venv, mpicc):
    step("2/5 the pinned packages" + ("" if mpicc else
         ": about 0.7 GB to download where a CPU build of torch is offered, 3.3 GB otherwise"))
    pip = [own_python(venv), "-m", "pip", "install", "--disable-pip-version-check", "--use-pep517"]
    wanted = ["-r", REQUIREMENTS]
    if mpicc:
        wanted = ["-r", venv / "requirements.txt", "-c", venv / "constraints.txt"]
        for path, text in zip(wanted[1::2], site_requirements(venv)):
            path.write_text(text)
    run([*pip, *([] if sys.stdout.isatty() else ["--quiet"]), *wanted], NOT_INSTALLED)
    if mpicc:
        os.environ["MPICC"] = mpicc
        pin, = re.findall(r"^mpi4py==\S+", pins()[0], re.M)
        run([*pip, "--quiet", "--no-deps", "--no-cache-dir", "--force-reinstall", "--no-binary", "mpi4py", pin],
            f"{mpicc} does not compile mpi4py here: are the site's modules loaded? make setup SITE=... loads them")


def mend_torchvision(venv):
    """Where torchvision does not load for want of its operators' names, declare them; note in which file."""
    step("3/5 torchvision")
    loads = [own_python(venv), "-c", "import torchvision"]
    find = "import importlib.util as u; print(u.find_spec('torchvision').submodule_search_locations[0])"
    folder = subprocess.run([own_python(venv), "-c", find], capture_output=True, text=True).stdout.strip()
    extension = Path(folder, "extension.py")
    if (subprocess.run(loads, capture_output=True).returncode and extension.is_relative_to(venv)
            and MEND not in read(extension)):
        extension.write_text(read(extension) + MEND)
    run(loads, f"torchvision does not load beside this torch: remove {venv}, and make setup makes it again", quiet=True)
    if MEND in read(extension):
        (venv / MENDED).write_text(str(extension))
    else:
        (venv / MENDED).unlink(missing_ok=True)


def add_horovod(venv):
    """Install Horovod, or note why chapter 2 has to do without."""
    step("5/5 Horovod")
    gpu, mpicc = site_of(venv)
    if gpu:
        os.environ["HOROVOD_GPU_OPERATIONS"] = gpu
    without = venv / WITHOUT_HOROVOD
    try:
        build_horovod.install(venv, pins()[1]["built"][0], try_ranks=not mpicc)
        without.unlink(missing_ok=True)
    except (build_horovod.BuildError, OSError, subprocess.SubprocessError) as problem:
        without.write_text(" ".join(str(problem).split()))
        step(f"chapter 2 is left out, the others work: {without.read_text()}")
