"""Count what a rank of chapter 5 keeps and sends, at every stage, as one of 1, 2 and 4 ranks.

Records: assets/records/zero.jsonl, which memory.ipynb draws.
"""

import sys
import tempfile
from pathlib import Path

from cluster.launch import ROOT, run_job
from cluster.records import RECORDS, describe_machine, read_records
from cluster.study import run_study

SHAPE = {"layers": 6, "width": 128, "context": 64}


def measure(script: str, ranks: int, stage: int, precision: str) -> dict:
    """Return what cluster.footprint counts of a run, and the number of parameters."""
    sys.path.insert(0, str(ROOT / "05_zero"))
    from zero_formula import parameter_count
    flags = [flag for name, value in SHAPE.items() for flag in (f"--{name}", value)]
    flags += ["--global-batch-size", 64, "--precision", precision, "--device", "cpu"]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        run_job([sys.executable, "-m", "cluster.footprint", "--ranks", ranks, "--tensors", "real",
                 "--results", results, ROOT / script, *flags, "--stage", stage])
        footprint, = read_records(results)
    return {"parameters": parameter_count(**SHAPE),
            **{name: footprint[name] for name in ("memory", "sent", "flops")},
            **describe_machine()}


if __name__ == "__main__":
    plan = [{"script": "05_zero/main.py", "ranks": ranks, "stage": stage, "precision": "bf16"}
            for stage in range(4) for ranks in (1, 2, 4)]
    run_study(RECORDS / "zero.jsonl", plan, measure)
