"""Build Horovod's wheel from its released source, once for each set of versions that it links to.

Nothing of Horovod is changed: its own set-up runs with a compiler wrapper, submit/c++17.sh. The wheel is kept in the
user's cache, because pip's does not know which PyTorch, TensorFlow and MPI a wheel was built with. Used by setup.py;
only the standard library is used here.

On a GPU cluster HOROVOD_GPU_OPERATIONS=NCCL (and, where NCCL is not in a usual place, HOROVOD_NCCL_HOME) lets Horovod
all-reduce with NCCL; every HOROVOD_ variable reaches its build. Not tried by us: it needs CUDA's compiler and NCCL.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

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


class BuildError(Exception):
    """Horovod cannot be had here; the text says why and what to do."""


def compiler():
    """The C++ compiler's name; None where it, make or Python's headers are missing."""
    name = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return name if shutil.which(name) and shutil.which("make") and headers.exists() else None


def build_environment(venv):
    """os.environ with Horovod's switches, the wrapper as compiler and the venv's MPI and CMake first on the path."""
    return {"MAKEFLAGS": f"-j{os.cpu_count()}"} | os.environ | SWITCHES | {
        "CXX": str(WRAPPER), "WORKSHOP_CXX": compiler(), "PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}


def cached_wheel(venv, pin):
    """Where the wheel is, or will be: the folder's name is a hash of all that goes into it."""
    env = build_environment(venv)
    versions = subprocess.run([venv / "bin" / "python", "-c", VERSIONS], capture_output=True, text=True, check=True,
                              env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}).stdout
    version = subprocess.run([env["WORKSHOP_CXX"], "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    switches = sorted(f"{name}={value}" for name, value in env.items() if name.startswith("HOROVOD_"))
    parts = (pin, versions, version, *switches, WRAPPER.read_text())
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "scaling-workshop" / f"{pin.replace('==', '-')}-{key}"


def build(venv, pin, folder):
    """Fill the folder with the wheel, showing the progress that make reports. Raises BuildError."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [venv / "bin" / "python", "-m", "pip", "wheel", "--disable-pip-version-check", "--verbose",
                   "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", scratch, pin]
        log, shown = folder.with_suffix(".log"), -1
        log.parent.mkdir(parents=True, exist_ok=True)
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
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
        log.unlink()


def install(venv, pin, try_ranks=True):
    """Install Horovod into the venv, from the cache or built now, and let two ranks all-reduce. Raises BuildError.

    try_ranks: False where no ranks can be started, as on the login node of a cluster.
    """
    if not compiler():
        raise BuildError("Horovod needs a C++ compiler, make and Python's headers: on Debian and Ubuntu "
                         "apt install g++ make python3-dev, then make setup")
    folder = cached_wheel(venv, pin)
    if folder.exists():
        print(f"set-up: Horovod's wheel of {folder}", flush=True)
    else:
        print(f"set-up: building Horovod with {os.cpu_count()} processes: some minutes, once", flush=True)
        build(venv, pin, folder)
    python = venv / "bin" / "python"
    wheel, = folder.glob("*.whl")
    trial = [venv / "bin" / "mpiexec", "-n", "2", python, "-c", ALLREDUCE]
    for command in [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--force-reinstall", wheel], *[trial] * try_ranks:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
        if done.returncode:
            shutil.rmtree(folder)
            print(*done.stdout.splitlines()[-8:], sep="\n", file=sys.stderr)
            raise BuildError(f"Horovod does not install, or does not all-reduce over two ranks (see above); mend that, "
                             f"remove {venv / '.workshop-ready'}, and run make setup again")
