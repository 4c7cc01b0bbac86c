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
import shutil
import subprocess
import tempfile
from pathlib import Path

from steps import SetUpFailed, lock_folder, run, step

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1", "HOROVOD_WITH_GLOO": "1",  # the build fails if one is missing
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the older one that gloo names
    "CXXFLAGS": "-include stdexcept -include cstdint",  # g++ 13 no longer includes them by itself
    "LDFLAGS": "-Wl,-rpath,$ORIGIN/../../../..",  # the environment's libmpi, relative to Horovod
}
CHANGES = [  # (file in Horovod 0.28.1, old text, new text)
    # PyTorch 2.14 needs C++20; gloo, which both libraries link to, has to be C++20, too
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    # An unused assignment to constants, which g++ 14 and newer reject
    ("third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
     "  FLATBUFFERS_CONSTEXPR_CPP14 span &operator=(const span &other)\n"
     "      FLATBUFFERS_NOEXCEPT {\n"
     "    data_ = other.data_;\n    count_ = other.count_;\n  }\n", ""),
    # This source includes a header that is missing from TensorFlow's wheel
    ("horovod/tensorflow/CMakeLists.txt",
     "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc", ""),
    # Still -O3, but without -g, which more than doubles the build time
    ("setup.py", "else 'RelWithDebInfo'", "else 'Release'"),
]
WITHOUT_CUDA = [
    # Build gloo once, and, as one unit, the sources common to the PyTorch and TensorFlow libraries:
    # half the compile time. As released, each is built twice.
    ("horovod/tensorflow/CMakeLists.txt", "LIBS compatible17_gloo)", "LIBS gloo)"),
    ("CMakeLists.txt", "if(HAVE_GLOO AND (DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17))",
     "if(FALSE)"),
    ("CMakeLists.txt", "#MXNet\n", """add_library(horovod_common OBJECT ${SOURCES})
target_include_directories(horovod_common PRIVATE \
${EIGEN_INCLUDE_PATH} ${FLATBUFFERS_INCLUDE_PATH})
set_target_properties(horovod_common PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
"""),
    ("horovod/tensorflow/CMakeLists.txt", "SHARED ${SOURCES}",
     "SHARED $<TARGET_OBJECTS:horovod_common>"),
    ("horovod/torch/CMakeLists.txt", "SHARED ${SOURCES}",
     "SHARED $<TARGET_OBJECTS:horovod_common>"),
    ("horovod/torch/CMakeLists.txt", 'PROPERTIES PREFIX "")',
     'PROPERTIES PREFIX "" UNITY_BUILD ON)'),
    # Ignore CUDA even if PyTorch was built for it or nvcc is installed
    ("cmake/Modules/FindPytorch.cmake", "(torch.version.cuda is not None)", "False"),
    ("CMakeLists.txt", "    enable_language(CUDA)\n", ""),
]
ALL_REDUCE_CODE = """
import torch, tensorflow, horovod.torch as hvd, horovod.tensorflow as tf_hvd
hvd.init(), tf_hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2
assert tf_hvd.allreduce(tensorflow.ones(1), op=hvd.Sum) == 2
assert hvd.mpi_built() and hvd.gloo_built()
"""


def missing_build_tools(include: str) -> list:
    """Return the Debian packages that the build needs and this machine lacks.

    include: the folder of Python's headers.
    """
    is_installed = {"g++": shutil.which(os.environ.get("CXX", "g++")), "make": shutil.which("make"),
                    "python3-dev": os.path.exists(f"{include}/Python.h")}
    return [package for package, installed in is_installed.items() if not installed]


def changes():
    """Return the changes to Horovod's source, with or without CUDA."""
    if os.environ.get("HOROVOD_GPU_OPERATIONS"):
        return CHANGES
    return CHANGES + WITHOUT_CUDA


def cache_key(venv):
    """Return a hash of everything that the wheel depends on."""
    pip = [venv / "bin/python", "-m", "pip"]
    packages = subprocess.check_output([*pip, "list", "--format=freeze"]).decode()
    libraries = re.findall("^(?:torch|tensorflow|tensorflow-cpu|mpich|mpi4py)==.*", packages, re.M)
    python = subprocess.check_output([venv / "bin/python", "-VV"])
    compiler = subprocess.check_output([os.environ.get("CXX", "g++"), "--version"])
    options = sorted((name, value) for name, value in os.environ.items()
                     if re.match("HOROVOD_|SITE_MPICC", name))
    parts = libraries, python, compiler, options, SETTINGS, changes()
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def change(source):
    """Patch the unpacked source. Raises SetUpFailed if the source is not 0.28.1."""
    for name, old, new in changes():
        text = (source / name).read_text()
        if old not in text:
            raise SetUpFailed(f"cannot patch Horovod: {name} differs from version 0.28.1, the only "
                              f"one that {__file__} can patch")
        (source / name).write_text(text.replace(old, new))


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
        run([*pip, "download", *options, "--no-binary", ":all:", "--dest", scratch,
             "--group", "horovod"], "could not download Horovod's source", cwd=str(ROOT))
        archive, = Path(scratch).glob("*.tar.gz")
        run(["tar", "-xzf", archive, "-C", scratch], "could not unpack Horovod's source")
        source = Path(scratch, archive.name[:-len(".tar.gz")])
        change(source)
        run([*pip, "wheel", "--verbose", *options, "--wheel-dir", f"{scratch}/wheel", source],
            f"Horovod was not built; {folder}.log says why", r"\[ *\d+%\]", log=f"{folder}.log",
            env=variables)
        unfinished = Path(f"{folder}.{os.getpid()}")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(f"{scratch}/wheel", str(unfinished))
        unfinished.rename(folder)  # so an incomplete wheel never has this name


def install(venv: Path, try_ranks: bool = True) -> None:
    """Install Horovod from the user's cache, building it first if needed; test it on two ranks.

    try_ranks: False on a cluster, whose login nodes start no ranks. Raises SetUpFailed or OSError.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(caches, "scaling-workshop")
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = cache / f"horovod-{cache_key(venv)}"
    with lock_folder(cache):
        if not [*folder.glob("*.whl")]:
            build(venv, folder)
    pip = [venv / "bin/python", "-m", "pip"]
    run([*pip, "install", "--no-deps", "--force-reinstall", *folder.glob("*.whl")],
        f"could not install the wheel: remove {folder} and run make setup again")
    if try_ranks:
        run([venv / "bin/mpiexec", "-n", "2", venv / "bin/python", "-c", ALL_REDUCE_CODE],
            "Horovod's all-reduce fails on two ranks",
            env=dict(os.environ, MPIEXEC_TIMEOUT="300"))
