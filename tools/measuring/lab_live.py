"""Turn the lab's link down while two nodes train, once; the record goes to assets/records/lab_live.jsonl.

    python -m tools.measuring.lab_live

03_ddp/scaling.ipynb does the same and draws it; where no lab can come up, it draws this record.
"""

import json
import sys

from launch import ROOT, machine
from records import refusal

from tools.notebooks import lab

RECORDS = ROOT / "assets" / "records" / "lab_live.jsonl"
RUN = {"first": "1gbit", "then": "100mbit", "after": 14, "epochs": 22}  # as in the notebook


def main():
    if reason := refusal(RECORDS):
        sys.exit(f"lab_live.py: {reason}")
    try:
        run = lab.trained(**RUN, watch=lambda _: None)
    except lab.NoLab as problem:
        sys.exit(f"lab_live.py: {problem}")
    RECORDS.write_text(json.dumps(run | machine()) + "\n")
    print(lab.on_turned(run))


if __name__ == "__main__":
    main()
