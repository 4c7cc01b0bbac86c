"""Time the all-reduces of chapter 2 on 2, 3 and 4 ranks. Records: allreduce.jsonl."""

from submit.study import RECORDS, command, records_of, study

RANKS, RUNS = (2, 3, 4), 3
REPEATS = 15  # per run, of each size and algorithm


def measure(run, ranks):
    """Return one run's records of all sizes and algorithms; `run` is its number."""
    arguments = command("02_horovod/ring_allreduce.py", ranks, "--repeats", REPEATS)
    return records_of(arguments, timeout=1800)


if __name__ == "__main__":
    study(RECORDS / "allreduce.jsonl",
          [{"run": run, "ranks": ranks} for run in range(RUNS) for ranks in RANKS], measure)
