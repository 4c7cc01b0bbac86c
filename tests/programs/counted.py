"""Run a main.py of chapter 5; rank 0 prints the collectives of its fourth step: `python counted.py MAIN FLAG...`.

TWIN=smooth trains the twin of smooth.py.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "submit"))
import smooth

from tools.measuring import collectives

if os.environ.get("TWIN"):
    smooth.torch_twin()
collectives.watch(sys.argv[1:])
