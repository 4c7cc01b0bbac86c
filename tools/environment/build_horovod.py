"""Build Horovod's wheel from its released source, once for each set of versions that it links to.

setup.py calls install(). The user's cache keeps the wheel, because pip and uv do not know which
PyTorch, TensorFlow and MPI it was built with. BUILD_PROCESSES=16 builds with 16 processes; the
default is at most 4, because login nodes limit a user's processes.

On a GPU cluster HOROVOD_GPU_OPERATIONS=NCCL lets Horovod all-reduce with NCCL (if NCCL is not in a
standard folder, set HOROVOD_NCCL_HOME, too). Untested: it needs CUDA's compiler and NCCL.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from steps import SetUpFailed, lock_folder, run, step

ROOT = Path(__file__).resolve().parent.parent.parent
VERSION, = re.findall('"horovod==([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1", "HOROVOD_WITH_GLOO": "1",  # the build fails if one is missing
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the older one that gloo names
    "CXXFLAGS": "-include stdexcept -include cstdint",  # g++ 13 no longer includes them by itself
    "LDFLAGS": "-Wl,-rpath,$ORIGIN/../../../..",  # the environment's libmpi, relative to Horovod
}
ALL_REDUCE_CODE = """
import torch, tensorflow, horovod.torch as hvd, horovod.tensorflow as tf_hvd
hvd.init(), tf_hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2
assert tf_hvd.allreduce(tensorflow.ones(1), op=hvd.Sum) == 2
assert hvd.mpi_built() and hvd.gloo_built()
"""


def missing_build_tools(include):
    """Return the Debian packages that the build needs and this machine lacks.

    include: the folder of Python's headers.
    """
    programs = {"g++": os.environ.get("CXX", "g++"), "make": "make", "git": "git"}  # for patches
    missing = [package for package, program in programs.items()  # macOS has stubs, which only fail
               if subprocess.getstatusoutput(f"{shlex.quote(program)} --version")[0]]
    return missing + ([] if os.path.exists(f"{include}/Python.h") else ["python3-dev"])


def patches():
    """Return the files with changes to Horovod's source."""
    names = ["horovod.patch"]
    if not os.environ.get("HOROVOD_GPU_OPERATIONS"):
        names.append("horovod_without_cuda.patch")
    return [Path(__file__).with_name(name) for name in names]


def cache_key(venv):
    """Return a hash of everything that the wheel depends on."""
    pip = [venv / "bin/python", "-m", "pip"]
    packages = subprocess.check_output([*pip, "list", "--format=freeze"]).decode()
    libraries = re.findall("^(?:torch|tensorflow|tensorflow-cpu|mpich|mpi4py)==.*", packages, re.M)
    python = subprocess.check_output([venv / "bin/python", "-VV"])
    compiler = subprocess.check_output([os.environ.get("CXX", "g++"), "--version"])
    options = sorted((name, value) for name, value in os.environ.items()
                     if re.match("HOROVOD_|SITE_MPICC", name))
    changes = [path.read_text() for path in patches()]
    parts = libraries, python, compiler, options, SETTINGS, changes
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def patch(source):
    """Change the unpacked source. Raises SetUpFailed if it is not the version of the patches."""
    outside_git = dict(os.environ, GIT_CEILING_DIRECTORIES=str(source.parent))
    run(["git", "apply", "--whitespace=nowarn", *patches()],
        "cannot patch Horovod: tools/environment has patches of version 0.28.1 only",
        cwd=str(source), env=outside_git)


def fetch_source(pip, cache, scratch):
    """Unpack Horovod's source into a folder, and keep the archive in the user's cache."""
    archive = cache / f"horovod-{VERSION}.tar.gz"
    with suppress(OSError, EOFError, shutil.ReadError):  # it is missing or incomplete
        shutil.unpack_archive(str(archive), scratch)
        return
    run([*pip, "download", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-binary",
         ":all:", "--dest", scratch, f"horovod=={VERSION}"], "could not download Horovod's source")
    shutil.unpack_archive(f"{scratch}/{archive.name}", scratch)
    shutil.copy(f"{scratch}/{archive.name}", str(archive))


def build(venv, folder):
    """Build the wheel into the folder. Raises SetUpFailed."""
    jobs = os.environ.get("BUILD_PROCESSES", min(4, os.cpu_count()))
    step(f"building Horovod, {jobs} processes at a time: several minutes, only the first time")
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
    with tempfile.TemporaryDirectory() as scratch:
        link = Path(scratch, "venv")  # CMake fails on spaces in the path of an MPI
        link.symlink_to(venv)
        variables = dict(os.environ, MAKEFLAGS=f"-j{jobs}",
                         PATH=f"{link}/bin:{os.environ['PATH']}", **SETTINGS)
        pip = [link / "bin/python", "-m", "pip"]
        fetch_source(pip, folder.parent, scratch)
        source = Path(scratch, f"horovod-{VERSION}")
        patch(source)
        run([*pip, "wheel", "--verbose", *options, "--wheel-dir", folder, source],
            f"Horovod was not built; {folder}.log says why (if memory or processes ran out: make "
            "setup BUILD_PROCESSES=1)", r"\[ *\d+%\]", log=f"{folder}.log", env=variables)


def install(venv, try_ranks=True):
    """Install Horovod from the user's cache, building it first if needed; test it on two ranks.

    try_ranks: False on a cluster, whose login nodes start no ranks. Raises SetUpFailed or OSError.
    """
    caches = (os.environ.get("UV_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
              or os.path.expanduser("~/.cache"))
    cache = Path(caches, "scaling-workshop")
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"horovod-{cache_key(venv)}"
    with lock_folder(cache):
        if not [*folder.glob("*.whl")]:
            build(venv, folder)
    run([venv / "bin/python", "-m", "pip", "install", "--no-deps", "--force-reinstall",
         *folder.glob("*.whl")],
        f"could not install the wheel: remove {folder} and run make setup again")
    if try_ranks:
        all_reduce = partial(
            run, [venv / "bin/mpiexec", "-n", "2", venv / "bin/python", "-c", ALL_REDUCE_CODE],
            "Horovod's all-reduce fails on two ranks", env=dict(os.environ, MPIEXEC_TIMEOUT="300"))
        try:
            all_reduce()
        except SetUpFailed:  # a rank may abort while it exits, once in many runs
            all_reduce()
