"""Time the all-reduces of chapter 3 on 2, 3 and 4 ranks. Records: allreduce.jsonl."""

from cluster.launch import rank_command
from cluster.records import RECORDS
from cluster.study import run_for_records, run_study

RANKS, RUNS = (2, 3, 4), 3
REPEATS = 15  # per run, of each size and algorithm


def measure(run, ranks):
    """Return one run's records of all sizes and algorithms; `run` is its number."""
    arguments = rank_command("03_ddp/ring_allreduce.py", ranks, "--repeats", REPEATS)
    return run_for_records(arguments, timeout=1800)


if __name__ == "__main__":
    plan = [{"run": run, "ranks": ranks} for run in range(RUNS) for ranks in RANKS]
    run_study(RECORDS / "allreduce.jsonl", plan, measure)
