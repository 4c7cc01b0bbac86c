"""Time the all-reduces of chapter 2 on 2, 3 and 4 ranks, in turn; the records go to assets/records/allreduce.jsonl."""

import sys

from launch import ROOT, launch_all
from records import refusal
from runs import study

RANKS, RUNS = (2, 3, 4), 3
REPEATS = 15  # of each size and algorithm within a run
RECORDS = ROOT / "assets" / "records" / "allreduce.jsonl"


def measure(run, ranks):
    """The records of all sizes and algorithms; `run` counts the repeats."""
    return launch_all("02_horovod/ring_allreduce.py", ranks, "--repeats", REPEATS, timeout=1800)


def main():
    if reason := refusal(RECORDS):
        sys.exit(f"allreduce.py: {reason}")
    study(RECORDS, [{"run": run, "ranks": ranks} for run in range(RUNS) for ranks in RANKS], measure)


if __name__ == "__main__":
    main()
