"""Finds out from a program's stack where it is, and whether it waits."""

import glob
import os
import sys
from collections.abc import Iterator
from types import FrameType

COMMUNICATES = (
    "/torch/distributed/", "/torch/nn/parallel/distributed", "/torch/autograd/graph",
    "/horovod/", "/deepspeed/comm", "/mpi4py/")
COMPILES = (
    "/subprocess.py", "/torch/utils/cpp_extension", "/torch/utils/file_baton",
    "/torch/_inductor", "/torch/_dynamo")
LIBRARIES = (  # parts of their files' paths, as of `pip install --target`
    "site-packages", "dist-packages", *(f"{folder}/" for folder in sys.path if folder and glob.glob(
        f"{glob.escape(folder)}/*.dist-info")))
CHECKER = os.path.join(os.path.dirname(__file__), "")


def stack(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, function) of a frame and its callers."""
    while frame:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def places(frame: FrameType, script: str) -> list[str]:
    """Return the program's own calls, innermost first, as texts "file:line, in function"."""
    frames = list(stack(frame))
    files = [path for path, _, _ in frames]
    if script in files:
        frames = frames[:files.index(script) + 1]
    own = [f"{os.path.basename(path)}:{line}, in {name}" for path, line, name in frames
           if not path.startswith(CHECKER) and not any(part in path for part in LIBRARIES)]
    return own or ["its start"]


def place(frame: FrameType, script: str) -> str:
    """Return the innermost of the program's own calls and its caller's line, as text."""
    innermost, *callers = places(frame, script)
    return " < ".join([innermost, *(caller.split(",")[0] for caller in callers[:1])])


def waits(frame: FrameType, on_gpu: bool) -> bool:
    """Return True if the program waits in communication, or in backward(), where DDP waits.

    On a GPU it may wait at any kernel launch, when the queue is full: all except compiling counts.
    """
    files = [path for path, _, _ in stack(frame)]
    communicates = any(part in path for path in files for part in COMMUNICATES)
    compiles = any(part in path for path in files for part in COMPILES)
    return (on_gpu or communicates) and not compiles
