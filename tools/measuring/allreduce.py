"""Time the all-reduces of chapter 2 on 2, 3 and 4 ranks, in turn. Records: assets/records/allreduce.jsonl."""

from launch import command, records_of
from records import RECORDS
from runs import study

RANKS, RUNS = (2, 3, 4), 3
REPEATS = 15  # of each size and algorithm within a run


def measure(run, ranks):
    """The records of all sizes and algorithms; `run` counts the repeats."""
    return records_of(command("02_horovod/pytorch/ring_allreduce.py", ranks, "--repeats", REPEATS), timeout=1800)


if __name__ == "__main__":
    study(RECORDS / "allreduce.jsonl", [{"run": run, "ranks": ranks} for run in range(RUNS) for ranks in RANKS],
          measure)
