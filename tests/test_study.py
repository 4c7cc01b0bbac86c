"""A killed study resumes and does each run once; the sweep's table has warnings."""

import re
import subprocess
import sys
import time

import pandas
import psutil
import pytest
from conftest import ROOT, read_records, run_command

from cluster import launch, sweep

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
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - start < 50, "the command's child process goes on"
        time.sleep(0.1)


@pytest.mark.slow
def test_weak_and_strong_scaling_on_two_ranks(tmp_path):
    results = tmp_path / "results.jsonl"
    result = run_command([sys.executable, "-m", "cluster.sweep", "weak", "strong", "--chapters",
                          "01_single_node", "03_ddp", "--ranks", 1, 2, "--repeats", 1,
                          "--batch-size", 32, "--results", results, "--",
                          "--max-steps", 2, "--device", "cpu"])
    assert result.code == 0, result.err
    names = "study", "chapter", "ranks", "batch_size", "global_batch_size"
    assert [tuple(record[name] for name in names) for record in read_records(results)] == [
        ("weak", "01_single_node", 1, 32, 32), ("weak", "03_ddp", 1, 32, 32),
        ("weak", "03_ddp", 2, 32, 64), ("strong", "01_single_node", 1, 32, 32),
        ("strong", "03_ddp", 1, 32, 32), ("strong", "03_ddp", 2, 16, 32)]
    assert "weak scaling" in result.out and "strong scaling" in result.out


@pytest.mark.check
@pytest.mark.fault
@pytest.mark.parametrize(("script", "reason"), [
    ("echo '{\"ranks\": 1}' > $2", "1 ranks were started: .* must start RANKS ranks"),
    ("sleep 50", "timed out after 1 seconds"), ("echo two", "no record\ntwo"),
    ("echo one; echo two; exit 3", "exit status 3.\none\ntwo")])
def test_a_run_without_a_record_says_why(script, reason, tmp_path, monkeypatch):
    command = ["bash", "-c", script, "bash"]  # followed by --results FILE
    monkeypatch.setattr(sweep, "script_command", lambda planned: (command, tmp_path, {}))
    monkeypatch.setattr(sweep, "TIMEOUT", 1)
    start = time.monotonic()
    with pytest.raises(subprocess.SubprocessError) as failure:
        sweep.measure(tmp_path, ranks=2, site="here")
    assert re.search(f"{reason}$", launch.describe_failure(failure.value))
    assert time.monotonic() - start < 20


@pytest.mark.check
def test_the_table_has_efficiency_and_warnings():
    runs = [{"study": "weak", "chapter": "03_ddp", "flags": "", "ranks": ranks, "batch": 64,
             "nodes": 1, "cpus": 2, "device": "cpu", "processor": "a CPU", "site": "here",
             "images_per_second": speed, "others": {175: 0.0, 180: 0.0, 185: 0.5}.get(speed)}
            for ranks, speeds in {1: (99, 100, 101), 2: (175, 180, 185), 4: (300, 400, 405)}.items()
            for speed in speeds]
    rows = sweep.summary(pandas.DataFrame(runs)).set_index("ranks")
    assert rows.efficiency.to_dict() == {1: 1.0, 2: 0.9, 4: 1.0} and set(rows.repeats) == {3}
    assert rows.remarks.to_dict() == {
        1: "", 2: "other programs used up to 50% of the cores",
        4: "more ranks than cores; spread 26%"}
    batches = pandas.DataFrame([run | {"study": "batch", "batch": 64 * run["ranks"], "ranks": 1}
                                for run in runs])
    assert list(sweep.summary(batches).efficiency) == [0.25, 0.45, 1.0]
    assert "spread 26%" in sweep.table(pandas.DataFrame(runs))
