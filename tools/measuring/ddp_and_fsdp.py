"""Time the same GPT under DDP and FSDP in three sizes, and count what a rank sends.

Records: ddp_and_fsdp.jsonl.
"""

import sys
import tempfile
from pathlib import Path

from cluster.launch import ROOT, rank_command, run_job
from cluster.records import RECORDS, read_records
from cluster.study import run_for_records, run_study

PROGRAM = "05_zero/ddp_and_fsdp.py"
RANKS, WIDTHS = 2, (96, 192, 384)


def measure(width):
    """Return the record of one size, with the bytes that rank 0 sends in a step of each."""
    record, = run_for_records(rank_command(PROGRAM, RANKS, "--width", width))
    sent = {}
    for wrapper in record["seconds"]:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results.jsonl")
            run_job([sys.executable, "-m", "cluster.footprint", "--ranks", RANKS, "--results",
                     results, ROOT / PROGRAM, "--width", width, "--wrapper", wrapper])
            footprint, = read_records(results)
        sent[wrapper] = sum(row["bytes"] for row in footprint["sent"])
    return record | {"sent": sent}


if __name__ == "__main__":
    run_study(RECORDS / "ddp_and_fsdp.jsonl", [{"width": width} for width in WIDTHS], measure)
