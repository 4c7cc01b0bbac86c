"""Time the all-reduces of chapter 2 on 2, 3 and 4 ranks. Records: allreduce.jsonl."""

from submit.study import RECORDS, command, records_of, study

RANKS, RUNS = (2, 3, 4), 3
REPEATS = 15  # of each size and algorithm within a run


def measure(run, ranks):
    """Return the records of all sizes and algorithms; `run` counts the repeats."""
    arguments = command("02_horovod/pytorch/ring_allreduce.py", ranks, "--repeats", REPEATS)
    return records_of(arguments, timeout=1800)


if __name__ == "__main__":
    study(RECORDS / "allreduce.jsonl",
          [{"run": run, "ranks": ranks} for run in range(RUNS) for ranks in RANKS], measure)
