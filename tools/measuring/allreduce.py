"""Time the all-reduces of chapter 2 on 2, 3 and 4 ranks, in turn; the records go to assets/allreduce.jsonl."""

import json
import sys

from launch import ROOT, launch_all
from records import refusal
from tqdm import tqdm

RANKS, RUNS = (2, 3, 4), 3
REPEATS = 15  # of each size and algorithm within a run
RECORDS = ROOT / "assets" / "allreduce.jsonl"


def main():
    if reason := refusal(RECORDS):
        sys.exit(f"allreduce.py: {reason}")
    records = []
    with tqdm([ranks for _ in range(RUNS) for ranks in RANKS], unit="run", disable=None) as bar:
        for ranks in bar:
            bar.set_description(f"{ranks} ranks")
            records += launch_all("02_horovod/ring_allreduce.py", ranks, "--repeats", REPEATS, timeout=1800)
    RECORDS.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
