"""Forty people, one machine: many jobs, sweeps and set-ups at the same time, from the same folder."""

import sys

import pytest
import sweep
from conftest import BIN, ROOT, lines, side_by_side, skip_without
from tolerances import FP64, close

JOBS = ["03_ddp"] * 3 + ["02_horovod/pytorch"] * 3 + ["04_deepspeed", "05_zero"]


@pytest.mark.fault
@skip_without("02_horovod/pytorch")
def test_eight_jobs_of_two_ranks_from_one_folder_into_one_file(tmp_path):
    results = tmp_path / "results.jsonl"
    flags = "--global-batch-size", 64, "--max-steps", 30, "--results", results
    starts = [([BIN / "mpiexec", "-n", 2, sys.executable, ROOT / chapter / "main.py", *flags,
                *([] if chapter[:2] in ("04", "05") else ["--precision", "fp64"])], {}) for chapter in JOBS]
    done = side_by_side(*starts, timeout=300)
    assert [code for code, _ in done] == [0] * len(JOBS), done
    records = lines(results)
    assert sorted(record["chapter"] for record in records) == sorted(JOBS)
    losses = [record["loss"] for record in records if record["chapter"] in ("03_ddp", "02_horovod/pytorch")]
    close("loss, fp64, relative", max(losses) / min(losses) - 1, FP64)
    assert all(record["ranks"] == 2 and record["steps"] == 30 for record in records)


@pytest.mark.fault
def test_two_sweeps_into_one_file(tmp_path):
    """Neither loses a record, whole lines all; each has all of its runs."""
    results = tmp_path / "results.jsonl"
    words = [sys.executable, ROOT / "submit" / "sweep.py", "batch", "--chapters", "01_single_node", "--repeats", 2,
             "--results", results]
    flags = ["--", "--max-steps", 2, "--device", "cpu"]
    done = side_by_side(([*words, "--batch-sizes", 16, 32, *flags], {}),
                        ([*words, "--batch-sizes", 64, 128, *flags], {}))
    assert [code for code, _ in done] == [0, 0], done
    found = sorted(tuple(record[name] for name in ("batch_size", "repeat")) for record in sweep.read(results))
    assert found == [(size, repeat) for size in (16, 32, 64, 128) for repeat in range(2)]
    assert len(lines(results)) == len(found)
