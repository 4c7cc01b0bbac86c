"""A study survives being killed: each run is done once, and the published file is complete."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, execute, lines, wait

from submit import study

STUDY = """
import os, pathlib, signal, sys
from submit import study

folder, kill_at = pathlib.Path(sys.argv[1]), int(sys.argv[2])
def do(n):
    study.append(folder / "begun", {"n": n})
    if n == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"twice": 2 * n}

study.study(folder / "r.jsonl", [{"n": n} for n in (1, 2, 3, 4)], do)
"""


@pytest.mark.fault
def test_a_killed_study_resumes(tmp_path):
    words = [sys.executable, "-c", STUDY, tmp_path]
    assert execute([*words, 3], cwd=ROOT).code == -9
    part = tmp_path / "r.jsonl.part"
    assert len(lines(part)) == 2  # written as soon as they were done
    part.write_text(part.read_text() + '{"n": 3, "tw')  # and a third, cut off
    done = execute([*words, 0], cwd=ROOT)
    assert done.code == 0, done.err
    assert [record["n"] for record in lines(tmp_path / "begun")] == [1, 2, 3, 3, 4]
    assert lines(tmp_path / "r.jsonl") == [{"n": n, "twice": 2 * n} for n in (1, 2, 3, 4)]
    assert not part.exists()


@pytest.mark.check
@pytest.mark.parametrize("name", ["git", "host"])
def test_partial_results_from_elsewhere_are_discarded(name, tmp_path, capsys):
    def do(n):
        raise OSError("no space left")

    here, part = study.machine(), tmp_path / "r.jsonl.part"
    study.append(part, {"n": 1} | here)
    with pytest.raises(SystemExit, match="2: no space left\ncompleted runs are in"):
        study.study(tmp_path / "r.jsonl", [{"n": 1}, {"n": 2}], do)
    assert lines(part) == [{"n": 1} | here]
    part.write_text(json.dumps(here | {"n": 1, name: "another"}))
    with pytest.raises(SystemExit):
        study.study(tmp_path / "r.jsonl", [{"n": 1}], do)
    assert not part.exists() and f"discarded {part}" in capsys.readouterr().err


@pytest.mark.check
def test_a_run_that_failed_is_done_again(tmp_path):
    path = tmp_path / "r.jsonl"
    assert study.once(path, {"n": 1}, lambda n: {"failed": "no end"})[0]["failed"]
    assert study.once(path, {"n": 1}, lambda n: [{"a": 1}, {"a": 2}]) == [
        {"n": 1, "a": 1}, {"n": 1, "a": 2}]
    assert study.once(path, {"n": 1}, lambda n: 1 / 0) == [{"n": 1, "a": 1}, {"n": 1, "a": 2}]
    assert len(study.read(path)) == 3


@pytest.mark.fault
def test_no_rank_outlives_a_run_that_takes_too_long(tmp_path):
    sleeper = f"sleep 98.765 & echo $! > {tmp_path}/pid; wait"
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        study.run(["bash", "-c", sleeper], timeout=1)
    assert time.monotonic() - began < 30
    pid = int((tmp_path / "pid").read_text())
    wait(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE,
         20, "the end of what the command has started")


@pytest.mark.check
def test_a_record_names_machine_and_commit():
    here = study.machine()
    assert here["host"] and here["processor"] and here["cpus"] == os.cpu_count() and here["torch"]
    assert here["git"] and here["time"].endswith("+00:00")
