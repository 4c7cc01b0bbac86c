"""A killed study resumes: it does each run once, and the published file is complete."""

import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, read_records, run_command, wait_until

from cluster import launch

STUDY = """
import os, pathlib, signal, sys
from cluster import records, study

folder, kill_at = pathlib.Path(sys.argv[1]), int(sys.argv[2])
def measure(n):
    records.append_records(folder / "begun", {"n": n})
    if n == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"twice": 2 * n}

study.run_study(folder / "r.jsonl", [{"n": n} for n in (1, 2, 3, 4)], measure)
"""


@pytest.mark.fault
def test_a_killed_study_resumes(tmp_path):
    command = [sys.executable, "-c", STUDY, tmp_path]
    assert run_command([*command, 3], cwd=ROOT).code == -9
    part = tmp_path / "r.jsonl.part"
    assert len(read_records(part)) == 2  # each written as soon as it is measured
    part.write_text(part.read_text() + '{"n": 3, "tw')  # an incomplete third record
    result = run_command([*command, 0], cwd=ROOT)
    assert result.code == 0, result.err
    assert [record["n"] for record in read_records(tmp_path / "begun")] == [1, 2, 3, 3, 4]
    assert read_records(tmp_path / "r.jsonl") == [{"n": n, "twice": 2 * n} for n in (1, 2, 3, 4)]
    assert not part.exists()


@pytest.mark.fault
def test_no_rank_outlives_a_run_that_times_out(tmp_path):
    sleeper = f"sleep 98.765 & echo $! > {tmp_path}/pid; wait"
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        launch.run_job(["bash", "-c", sleeper], timeout=1)
    assert time.monotonic() - start < 30
    pid = int((tmp_path / "pid").read_text())

    def has_ended():
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    wait_until(has_ended, 20, "the end of the command's child process")
