"""The first cell of every notebook runs this file: %run ../tools/notebooks/ready.py

It lets later cells import tools and submit, and commands find mpiexec. Outside the workshop's
environment it says what to do, and the next cell fails. Until it has checked that, it imports only
the standard library, and old Pythons can parse it.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
MODULES = "matplotlib", "pandas", "torch", "ipywidgets"  # rarely all in another Python


def missing():
    """Return one line on what is missing and how to get it; None in the workshop's environment."""
    for module in MODULES:
        if importlib.util.find_spec(module) is None:
            return (f"No module named {module}: this kernel is {sys.executable}, not the "
                    f"workshop's environment. Close the notebook and run: cd {TOP} && make setup "
                    "&& .venv/bin/jupyter lab")
    return None


def find_mpiexec():
    """Put mpiexec on PATH; if there is none, a stand-in that shows recorded output."""
    here = Path(sys.executable).parent
    os.environ["PATH"] = f"{here}{os.pathsep}{os.environ['PATH']}"
    if not shutil.which("mpiexec"):
        folder = tempfile.mkdtemp()
        os.symlink(TOP / "tools" / "notebooks" / "recorded_ranks.py", f"{folder}/mpiexec")
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        print("mpiexec not found: cells that start ranks show recorded output instead")


def prepare():
    """Set the path of modules, the environment of commands, and how figures are shown."""
    if str(TOP) not in sys.path:
        sys.path.append(str(TOP))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HYDRA_LAUNCHER"] = "fork"  # mpiexec stays on this node, even in a batch job
    os.environ["HYDRA_RMK"] = "user"
    find_mpiexec()
    from matplotlib_inline.backend_inline import set_matplotlib_formats
    set_matplotlib_formats("retina", bbox_inches=None)  # sharp, and of the size that the cell sets


if __name__ == "__main__":
    problem = missing()
    if problem:
        print(problem, file=sys.stderr)
    else:
        prepare()
        print("ready")
