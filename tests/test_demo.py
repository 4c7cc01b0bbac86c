"""The demo trains one and two ranks equally, says if the machine was busy, and draws its figure."""

import re
import subprocess
import sys
import time

import psutil
import pytest
from conftest import read_records

from cluster.launch import rank_command, run_job
from cluster.study import own_seconds, watch_load
from tools.measuring import demo

BURN = "import time\nwhile time.process_time() < 1: pass"


def test_one_and_two_real_ranks_train_equally(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "PROGRAMS", [row for row in demo.PROGRAMS if row[0] == "3 DDP"])
    monkeypatch.setattr(sys, "argv", ["demo", str(tmp_path), "--passes", "1"])
    demo.main()
    exact, *timed = read_records(tmp_path / "demo.jsonl")
    assert exact["precision"] == "fp64" and exact["difference"] < demo.EQUAL
    assert [(run["ranks"], run["precision"]) for run in timed] == [(1, "fp32"), (2, "fp32")]
    assert all(run["others"] >= 0 and run["steps"] >= 20 for run in timed)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^3 DDP +2 .* yes$", capsys.readouterr().out, re.M)


@pytest.mark.check
def test_speeds_that_the_page_compares_have_the_same_precision_and_batch():
    timed = [record for record in read_records("demo.jsonl") if "difference" not in record]
    kinds = {(run["model"], run["precision"], run["global_batch_size"]) for run in timed}
    assert sorted(kinds) == [("GPT", "fp32", 384), ("cnn", "fp32", 64)]


def test_a_job_s_own_ranks_are_not_other_programs(tmp_path):
    (tmp_path / "burn.py").write_text(BURN)
    before = own_seconds()
    run_job(rank_command(tmp_path / "burn.py", 2))
    assert own_seconds() - before > 2  # both ranks, although mpiexec has not started them itself


def test_other_programs_are_seen_during_a_run():
    other = subprocess.Popen([sys.executable, "-c", BURN])
    start = time.monotonic()
    with watch_load() as load:
        while psutil.Process(other.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.1)
        seconds = time.monotonic() - start
    other.wait()
    assert load["others"] * seconds * psutil.cpu_count() > 0.8


def run_record(ranks, speed, others=0.0, **values):
    return {"chapter": "03_ddp", "name": "3 DDP", "ranks": ranks, "images_per_second": speed,
            "model": "cnn", "test_accuracy": 0.9, "cpus": 2, "others": others} | values


@pytest.mark.check
@pytest.mark.parametrize(("others", "cpus", "warning"), [
    (0.01, 2, ""), (0.4, 2, "speeds of 3 DDP:\nmeanwhile other programs used up to 40%"),
    (0.01, 1, "shared one core")])
def test_the_table_has_medians_ranges_and_a_warning(others, cpus, warning):
    records = [run_record(ranks, speed, cpus=cpus)
               for one, two in ((100, 150), (50, 90), (110, 121))
               for ranks, speed in ((1, one), (2, two))]
    records[2]["others"] = others  # of one of the three runs on one rank
    records.append(run_record(2, 10, difference=1e-3))
    two_ranks = demo.summary(records)["3 DDP", 2]
    assert demo.line(two_ranks).split() == [
        "3", "DDP", "2", "121", "90-150", "1.50", "1.10-1.80", "90.0%", "NO"]
    assert warning in demo.warning(records) and bool(warning) == bool(demo.warning(records))
