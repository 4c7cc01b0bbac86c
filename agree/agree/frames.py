"""Finds out from a program's stack where it is."""

import glob
import os
import sys
from types import FrameType

LIBRARIES = (  # parts of their files' paths, as of `pip install --target`
    "site-packages", "dist-packages", *(f"{folder}/" for folder in sys.path if folder and glob.glob(
        f"{glob.escape(folder)}/*.dist-info")))
CHECKER = os.path.join(os.path.dirname(__file__), "")


def places(frame: FrameType | None, script: str) -> list[str]:
    """Return the program's own calls, innermost first, as texts "file:line, in function"."""
    own = []
    while frame:
        path = frame.f_code.co_filename
        if not path.startswith(CHECKER) and not any(part in path for part in LIBRARIES):
            own.append(f"{os.path.basename(path)}:{frame.f_lineno}, in {frame.f_code.co_name}")
        frame = None if path == script else frame.f_back
    return own or ["its start"]


def place(frame: FrameType, script: str) -> str:
    """Return the innermost of the program's own calls and its caller's line, as text."""
    innermost, *callers = places(frame, script)
    return " < ".join([innermost, *(caller.split(",")[0] for caller in callers[:1])])
