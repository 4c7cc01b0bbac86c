"""Build Horovod's wheel from its released source, once for each set of versions that it links to.

Nothing of Horovod is changed: its own set-up runs with a compiler wrapper, c++17.sh. The wheel is kept in the
user's cache, because pip's does not know which PyTorch, TensorFlow and MPI a wheel was built with. Used by
environment.py; only the standard library is used here.

BUILD_PROCESSES=16 builds with as many processes; at most 4 otherwise, because login nodes limit a user's tasks.

On a GPU cluster HOROVOD_GPU_OPERATIONS=NCCL (and, where NCCL is not in a usual place, HOROVOD_NCCL_HOME) lets Horovod
all-reduce with NCCL; every HOROVOD_ variable reaches its build. Not tried by us: it needs CUDA's compiler and NCCL.
"""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import one_at_a_time

WRAPPER = Path(__file__).with_name("c++17.sh")
SWITCHES = {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_MPI": "1", "HOROVOD_WITH_GLOO": "1", "CMAKE_POLICY_VERSION_MINIMUM": "3.5"}
VERSIONS = """
import sys, sysconfig, torch, tensorflow
from mpi4py import rc
rc.initialize = False
from mpi4py import MPI
print(sys.version, sysconfig.get_platform(), torch.__version__, tensorflow.__version__, MPI.Get_library_version())
"""
ALLREDUCE = """
import torch, tensorflow, horovod.torch as hvd, horovod.tensorflow as tf_hvd
hvd.init(), tf_hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == tf_hvd.allreduce(tensorflow.ones(1), op=hvd.Sum) == 2
assert hvd.mpi_built() and hvd.gloo_built()
"""
NO_COMPILER = ("Horovod needs a C++ compiler, make and Python's headers: on Debian and Ubuntu "
               "apt install g++ make python3-dev, then make setup")
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class BuildError(Exception):
    """Horovod cannot be had here; the text says why and what to do."""


def compiler() -> str | None:
    """The C++ compiler's name; None where it, make or Python's headers are missing."""
    name = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return name if shutil.which(name) and shutil.which("make") and headers.exists() else None


def processes() -> int:
    """How many processes build Horovod. Raises BuildError."""
    asked = os.environ.get("BUILD_PROCESSES", str(min(4, os.cpu_count() or 1)))
    if not re.fullmatch("[1-9][0-9]*", asked):
        raise BuildError(f"BUILD_PROCESSES={asked} is no number of processes: take 1 or more")
    return int(asked)


def build_environment(venv):
    """os.environ with Horovod's switches, the wrapper as compiler and the venv's MPI and CMake first on the path."""
    return os.environ | SWITCHES | {  # MAKEFLAGS is make's own under `make setup`; empty, Horovod would take 8
        "MAKEFLAGS": f"-j{processes()}", "CXX": str(WRAPPER), "WORKSHOP_CXX": compiler(),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}


def cached_wheel(venv, pin):
    """Where the wheel is, or will be: the folder's name is a hash of all that goes into it."""
    env = build_environment(venv)
    versions = subprocess.run([venv / "bin" / "python", "-c", VERSIONS], capture_output=True, text=True, check=True,
                              env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}).stdout
    version = subprocess.run([env["WORKSHOP_CXX"], "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    switches = sorted(f"{name}={value}" for name, value in env.items() if name.startswith("HOROVOD_"))
    parts = (pin, versions, version, *switches, WRAPPER.read_text())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return kept_in(venv, f"{pin.replace('==', '-')}-{key}")


def others_write(path):
    """Whether somebody else, but root, owns this or may write there."""
    found = path.stat()
    return found.st_uid not in (os.getuid(), 0) or bool(found.st_mode & OTHERS_WRITE)


def kept_in(venv, name):
    """The folder of a wheel: in the user's cache, unless others could put there what would be installed here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scaling-workshop"
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.mkdir(mode=0o700, exist_ok=True)
        used = [path for path in (cache, cache / name, *(cache / name).glob("*")) if path.exists()]
        if not os.access(cache, os.W_OK):
            reason = "you may not write there"
        elif any(others_write(path) for path in used):
            reason = f"others may write there; chmod -R go-w {cache}, if it is yours and you trust what is in it"
        else:
            return cache / name
    except OSError as problem:
        reason = problem.strerror
    print(f"set-up: {cache} is not used: {reason}", flush=True)
    own = venv / "horovod"
    own.mkdir(mode=0o700, exist_ok=True)
    return own / name


def build(venv, pin, folder):
    """Fill the folder with the wheel, showing the progress that make reports. Raises BuildError."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [venv / "bin" / "python", "-m", "pip", "wheel", "--disable-pip-version-check", "--verbose",
                   "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", scratch, pin]
        log, shown = folder.with_name(f"{folder.name}.log"), -1
        with (open(log, "w") as file,
              subprocess.Popen(command, env=build_environment(venv), text=True, errors="replace",
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process):
            for line in process.stdout:
                file.write(line)
                percent = re.match(r"\s*\[ *(\d+)%\]", line)
                if percent and int(percent[1]) // 10 > shown:
                    shown = int(percent[1]) // 10
                    print(f"set-up: Horovod {shown * 10} %", flush=True)
        if process.returncode:
            raise BuildError(f"Horovod was not built; {log} says why. Mend that, remove {venv / '.workshop-ready'}, "
                             "and run make setup again")
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.copytree(scratch, part)  # another name first: what has the right name is whole
        for wheel in part.iterdir():
            wheel.chmod(0o644)  # whatever the umask: nobody else may change it
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
        log.unlink()


def have_wheel(venv, pin, folder):
    """The wheel of this folder; built now where it is not there, or where there are several. Raises BuildError."""
    wheels = [*folder.glob("*.whl")]
    if len(wheels) == 1:
        print(f"set-up: Horovod's wheel of {folder}", flush=True)
        return wheels[0]
    print(f"set-up: building Horovod, {processes()} processes at a time: some minutes, once", flush=True)
    build(venv, pin, folder)
    wheels = [*folder.glob("*.whl")]
    if len(wheels) != 1:
        raise BuildError(f"the build left {len(wheels)} wheels in {folder}, not one")
    return wheels[0]


def succeeds(command):
    """Run a command; where it fails, or takes five minutes, show its last lines. Returns whether it succeeded."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
        code, printed = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        code, printed = 1, f"no end after five minutes: {' '.join(map(str, command))[:200]}"
    if code:
        print(*printed.splitlines()[-8:], sep="\n", file=sys.stderr)
    return code == 0


def install(venv: Path, pin: str, try_ranks: bool = True) -> None:
    """Install Horovod into the venv, from the cache or built now, and let two ranks all-reduce. Raises BuildError.

    try_ranks: False where no ranks can be started, as on the login node of a cluster.
    """
    if not compiler():
        raise BuildError(NO_COMPILER)
    again = f"mend that, remove {venv / '.workshop-ready'}, and run make setup again"
    python, folder = venv / "bin" / "python", cached_wheel(venv, pin)
    with one_at_a_time.alone(folder.with_name(f"{folder.name}.lock"), folder):
        wheel = have_wheel(venv, pin, folder)
        if not succeeds([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                         "--force-reinstall", wheel]):
            shutil.rmtree(folder)
            raise BuildError(f"Horovod does not install (see above); {again}")
    if try_ranks and not succeeds([venv / "bin" / "mpiexec", "-n", "2", python, "-c", ALLREDUCE]):
        raise BuildError(f"Horovod does not all-reduce over two ranks (see above); {again}")
