"""The first cell of every notebook runs this file: %run ../tools/notebooks/ready.py

Later cells can then import tools and cluster, and commands find mpiexec. Outside the workshop's
environment it prints what to do, and the next cell fails. Before that check it imports only the
standard library, and its syntax suits old Pythons.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
MODULES = "matplotlib", "pandas", "torch", "ipywidgets"  # another Python rarely has all of them

missing = [module for module in MODULES if importlib.util.find_spec(module) is None]
if missing:
    print(f"No module named {missing[0]}: this kernel is {sys.executable}, not the workshop's "
          f"environment. Close the notebook and run: cd {TOP} && make setup && "
          ".venv/bin/jupyter lab", file=sys.stderr)
else:
    if str(TOP) not in sys.path:
        sys.path.append(str(TOP))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HYDRA_LAUNCHER"] = "fork"  # mpiexec stays on this node, even in a batch job
    os.environ["HYDRA_RMK"] = "user"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if not shutil.which("mpiexec") or not importlib.util.find_spec("mpi4py"):
        os.environ["PATH"] = f"{TOP}/tools/notebooks/without_mpi{os.pathsep}{os.environ['PATH']}"
        print("no MPI here: in this notebook torchrun starts the ranks in place of mpiexec")
    from matplotlib_inline.backend_inline import set_matplotlib_formats
    set_matplotlib_formats("retina", bbox_inches=None)  # sharp, in the cell's size
    print("ready")
