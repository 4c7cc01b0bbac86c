"""Build Horovod's wheel from its released source, once for each set of versions that it links to.

setup.py calls install(). The wheel is kept in the user's cache, because pip and uv do not know
which PyTorch, TensorFlow and MPI it was built with. BUILD_PROCESSES=16 builds with as many
processes; at most 4 otherwise, because login nodes limit a user's tasks.

On a GPU cluster HOROVOD_GPU_OPERATIONS=NCCL (and, where NCCL is not in a usual place,
HOROVOD_NCCL_HOME) lets Horovod all-reduce with NCCL. Not tried: it needs CUDA's compiler and NCCL.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from steps import SetUpFailed, alone, run, step

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1", "HOROVOD_WITH_GLOO": "1",  # without one of them the build fails
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # gloo asks for less, which CMake 4 refuses
    "CXXFLAGS": "-include stdexcept -include cstdint",  # which g++ 13 and newer want named
    "LDFLAGS": "-Wl,-rpath,$ORIGIN/../../../..",  # libmpi of the environment, wherever that is
}
CHANGES = [  # a file of Horovod 0.28.1, what stands there, what is to stand there
    # PyTorch's and TensorFlow's headers are C++17; gloo, which both are linked to, has to be, too
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # An assignment to constants, which g++ 14 and newer refuse; nothing uses it
    ("third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
     "  FLATBUFFERS_CONSTEXPR_CPP14 span &operator=(const span &other)\n"
     "      FLATBUFFERS_NOEXCEPT {\n"
     "    data_ = other.data_;\n    count_ = other.count_;\n  }\n", ""),
    # It includes a header that TensorFlow's wheel lacks
    ("horovod/tensorflow/CMakeLists.txt",
     "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc", ""),
    # The same -O3, without -g, which takes more than twice the time
    ("setup.py", "else 'RelWithDebInfo'", "else 'Release'"),
]
WITHOUT_CUDA = [
    # Half of the compiler's time: as released, gloo is built twice (for C++14 and C++17), and the
    # sources that both libraries have are compiled for each of them, file by file. Now all is
    # C++17, and they are compiled once, as one.
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
    # PyTorch may be built for CUDA, and nvcc, or a part of a toolkit, be on this machine
    ("cmake/Modules/FindPytorch.cmake", "(torch.version.cuda is not None)", "False"),
    ("CMakeLists.txt", "    enable_language(CUDA)\n", ""),
]
ALLREDUCE = """
import torch, tensorflow, horovod.torch as hvd, horovod.tensorflow as tf_hvd
hvd.init(), tf_hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2
assert tf_hvd.allreduce(tensorflow.ones(1), op=hvd.Sum) == 2
assert hvd.mpi_built() and hvd.gloo_built()
"""


def lacking(include: str) -> list:
    """Return what the build needs and this machine lacks, by Debian's names.

    include: the folder of Python's headers.
    """
    places = {"g++": shutil.which(os.environ.get("CXX", "g++")), "make": shutil.which("make"),
              "python3-dev": os.path.exists(f"{include}/Python.h")}
    return [name for name, place in places.items() if not place]


def changes():
    return CHANGES + ([] if os.environ.get("HOROVOD_GPU_OPERATIONS") else WITHOUT_CUDA)


def key(venv):
    """Return a hash of all that goes into the wheel."""
    pip = [venv / "bin/python", "-m", "pip"]
    packages = subprocess.check_output([*pip, "list", "--format=freeze"]).decode()
    linked = re.findall("^(?:torch|tensorflow|tensorflow-cpu|mpich|mpi4py)==.*", packages, re.M)
    python = subprocess.check_output([venv / "bin/python", "-VV"])
    compiler = subprocess.check_output([os.environ.get("CXX", "g++"), "--version"])
    chosen = sorted(item for item in os.environ.items()
                    if re.match("HOROVOD_|SITE_MPICC", item[0]))
    parts = linked, python, compiler, chosen, SETTINGS, changes()
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def change(source):
    """Make the changes in the unpacked source. Raises SetUpFailed where it is another source."""
    for name, old, new in changes():
        text = (source / name).read_text()
        if old not in text:
            raise SetUpFailed(f"{name} of this Horovod is not that of 0.28.1, for which {__file__} "
                              "has the changes")
        (source / name).write_text(text.replace(old, new))


def build(venv, folder):
    """Fill the folder with the wheel. Raises SetUpFailed."""
    at_once = os.environ.get("BUILD_PROCESSES", min(4, os.cpu_count()))
    step(f"building Horovod, {at_once} processes at a time: some minutes, once")
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
    with tempfile.TemporaryDirectory() as scratch:
        link = Path(scratch, "venv")  # CMake takes no blanks in the path of an MPI
        link.symlink_to(venv)
        settings = dict(os.environ, MAKEFLAGS=f"-j{at_once}",
                        PATH=f"{link}/bin:{os.environ['PATH']}", **SETTINGS)
        pip = [link / "bin/python", "-m", "pip"]
        run([*pip, "download", *options, "--no-binary", ":all:", "--dest", scratch,
             "--group", "horovod"], "Horovod's source cannot be downloaded", cwd=str(ROOT))
        archive, = Path(scratch).glob("*.tar.gz")
        run(["tar", "-xzf", archive, "-C", scratch], "Horovod's source cannot be unpacked")
        source = Path(scratch, archive.name[:-len(".tar.gz")])
        change(source)
        run([*pip, "wheel", "--verbose", *options, "--wheel-dir", f"{scratch}/wheel", source],
            f"Horovod was not built; {folder}.log says why", r"\[ *\d+%\]", log=f"{folder}.log",
            env=settings)
        part = Path(f"{folder}.{os.getpid()}")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(f"{scratch}/wheel", str(part))
        part.rename(folder)  # what has the name is whole


def install(venv: Path, cache: Path, try_ranks: bool = True) -> None:
    """Install Horovod, from the cache or built now, and let two ranks all-reduce.

    cache: the folder that keeps wheels. try_ranks: False on the login node of a cluster, where no
    ranks can be started. Raises SetUpFailed.
    """
    folder = cache / f"horovod-{key(venv)}"
    with alone(cache):
        if not [*folder.glob("*.whl")]:
            build(venv, folder)
    pip = [venv / "bin/python", "-m", "pip"]
    run([*pip, "install", "--no-deps", "--force-reinstall", *folder.glob("*.whl")],
        f"remove {folder}, and make setup builds it again")
    if try_ranks:
        run([venv / "bin/mpiexec", "-n", "2", venv / "bin/python", "-c", ALLREDUCE],
            "Horovod does not all-reduce over two ranks",
            env=dict(os.environ, MPIEXEC_TIMEOUT="300"))
