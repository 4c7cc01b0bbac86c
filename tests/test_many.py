"""Forty people, one machine: many jobs at the same time, from the same folder, into one file."""

import sys

import pytest
from conftest import BIN, ROOT, lines, side_by_side, skip_without
from tolerances import FP64, close

JOBS = ["03_ddp", "03_ddp", "02_horovod/pytorch", "02_horovod/pytorch", "04_deepspeed", "05_zero"]
FLAGS = "--global-batch-size", 64, "--max-steps", 30


@pytest.mark.slow
@pytest.mark.fault
@skip_without("02_horovod/pytorch")
def test_six_jobs_of_two_ranks_from_one_folder_into_one_file(tmp_path):
    results = tmp_path / "results.jsonl"
    starts = []
    for chapter in JOBS:
        main = ROOT / chapter / "main.py"
        words = [BIN / "mpiexec", "-n", 2, sys.executable, main, *FLAGS, "--results", results]
        if chapter not in ("04_deepspeed", "05_zero"):
            words += ["--precision", "fp64"]
        starts.append((words, {}))
    done = side_by_side(*starts, timeout=300)
    assert [code for code, _ in done] == [0] * len(JOBS), done
    records = lines(results)
    assert sorted(record["chapter"] for record in records) == sorted(JOBS)
    losses = [record["loss"] for record in records
              if record["chapter"] in ("03_ddp", "02_horovod/pytorch")]
    close("loss, fp64, relative", max(losses) / min(losses) - 1, FP64)
    assert all(record["ranks"] == 2 and record["steps"] == 30 for record in records)
