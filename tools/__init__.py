"""What `make` runs: the environment, measurements, pages. By hand, in the top folder: python -m tools.measuring.demo.

Arrows go one way: tools use what lies in submit/ (launch.py, records.py, sweep.py, doctor.py), never the other way.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "submit"))
