"""The first cell of every notebook runs this file: %run ../tools/notebooks/ready.py

It lets later cells import tools and submit, and commands find mpiexec. In another Python than the
workshop's it says what to do; then the next cell fails. Only the standard library is imported
before that is known, and an old Python can read this file.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
MODULES = "matplotlib", "pandas", "torch", "ipywidgets"  # another Python hardly has them all


def missing():
    """Return what is missing and how to get it, as one line; None in the workshop's Python."""
    for module in MODULES:
        if importlib.util.find_spec(module) is None:
            return (f"{module} is missing: this is not the workshop's Python, but {sys.executable};"
                    f" close this, and in {TOP}: make setup && .venv/bin/jupyter lab")
    return None


def find_mpiexec():
    """Let the notebook's commands find mpiexec; where there is none, a stand-in shows records."""
    here = Path(sys.executable).parent
    os.environ["PATH"] = f"{here}{os.pathsep}{os.environ['PATH']}"
    if not shutil.which("mpiexec"):
        folder = tempfile.mkdtemp()
        os.symlink(TOP / "tools" / "notebooks" / "recorded_ranks.py", f"{folder}/mpiexec")
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        print("no mpiexec here: cells that start ranks show their record")


def prepare():
    """Set the path of modules, the environment of commands, and how figures are shown."""
    if str(TOP) not in sys.path:
        sys.path.append(str(TOP))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HYDRA_LAUNCHER"] = "fork"  # mpiexec stays on this node, inside a batch job, too
    os.environ["HYDRA_RMK"] = "user"
    find_mpiexec()
    from matplotlib_inline.backend_inline import set_matplotlib_formats
    set_matplotlib_formats("retina", bbox_inches=None)  # sharp, and as large as the cell says


if __name__ == "__main__":
    problem = missing()
    if problem:
        print(problem, file=sys.stderr)
    else:
        prepare()
        print("ready")
