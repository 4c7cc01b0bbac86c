"""What the first cell of every notebook calls: is all here that the notebook needs?

Only the standard library is imported: the notebook may have been opened outside the workshop's environment.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

from records import ROOT, published

MODULES = "matplotlib", "pandas", "torch"  # of the environment; another Python may have one, hardly all


class NotReady(Exception):
    """Something is missing; the notebook shows one line, and stops."""

    def _render_traceback_(self):  # IPython's own hook
        return [str(self)]


def needs(*files):
    """Check the environment and the files, named from the top folder; let the notebook's commands find mpiexec.

    Where there is no mpiexec, a stand-in shows what ranks printed elsewhere.

    Raises NotReady with what is missing and the command that makes it, and Unpublished for a record in assets/ that is
    not of a commit.
    """
    here = Path(sys.executable).parent
    os.environ |= {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                   "HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user"}  # on this node, also inside a batch job
    lab = f"close this, and in {ROOT}: make setup && .venv/bin/jupyter lab"
    for module in MODULES:
        if importlib.util.find_spec(module) is None:
            raise NotReady(f"{module} is missing: this is not the workshop's Python, but {sys.executable}; {lab}")
    for file in files:
        if not (ROOT / file).exists():
            raise NotReady(f"{file} is missing; in {ROOT}: git checkout {file}")
        if file.startswith("assets/records/") and file.endswith(".jsonl"):
            published(Path(file).name)
    if not shutil.which("mpiexec"):
        os.environ["PATH"] = f"{stand_in()}{os.pathsep}{os.environ['PATH']}"
        print("no mpiexec here: cells that start ranks show their record")
    print("ready")


@cache
def stand_in():
    """A folder with an mpiexec that shows records."""
    folder = tempfile.mkdtemp()
    os.symlink(ROOT / "tools" / "notebooks" / "recorded_ranks.py", f"{folder}/mpiexec")
    return folder
