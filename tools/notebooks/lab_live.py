"""Turn the lab's link down while two nodes train, once. Records: assets/records/lab_live.jsonl.

03_ddp/scaling.ipynb does the same and draws it; where no lab can come up, it draws this record.
"""

import sys

from launch import machine
from records import RECORDS
from runs import study

from tools.notebooks import lab

RUN = {"first": "1gbit", "then": "100mbit", "after": 14, "epochs": 22}  # as in the notebook


def measure(**run):
    try:
        return lab.trained(**run, watch=lambda _: None) | machine()
    except lab.NoLab as problem:
        sys.exit(f"lab_live.py: {problem}")


if __name__ == "__main__":
    print(lab.on_turned(*study(RECORDS / "lab_live.jsonl", [RUN], measure)))
