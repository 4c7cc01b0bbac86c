"""The sweep: every run recorded once, whatever interrupts it; what is remarkable is flagged."""

import re
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pandas
import psutil
import pytest
import sweep
from conftest import ROOT, environment, execute, lines, wait

SWEEP = [sys.executable, ROOT / "submit" / "sweep.py"]
QUICK = ["--max-steps", "2", "--device", "cpu"]
TWO = ["batch", "--chapters", "01_single_node", "--batch-sizes", "32", "64", "--repeats", "1"]  # runs


@pytest.mark.slow
def test_weak_and_strong_scaling_with_two_ranks(tmp_path):
    results = tmp_path / "results.jsonl"
    done = execute([*SWEEP, "weak", "strong", "--chapters", "01_single_node", "03_ddp", "--ranks", 1, 2, "--repeats", 1,
                    "--batch-size", 32, "--results", results, "--", *QUICK])
    assert done.code == 0, done.err
    found = [(record["study"], record["chapter"], record["ranks"], record["batch_size"], record["global_batch_size"])
             for record in lines(results)]
    assert found == [("weak", "01_single_node", 1, 32, 32), ("weak", "03_ddp", 1, 32, 32),
                     ("weak", "03_ddp", 2, 32, 64), ("strong", "01_single_node", 1, 32, 32),
                     ("strong", "03_ddp", 1, 32, 32), ("strong", "03_ddp", 2, 16, 32)]
    assert all(record["processor"] and record["cpus"] and record["host"] for record in lines(results))
    assert "weak scaling" in done.out and "strong scaling" in done.out


@pytest.mark.fault
@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_killed_sweep_goes_on_where_it_was(how, tmp_path):
    """Killed during the second run of two; the file's last line is cut off, too, where it dies at once."""
    mark = str(tmp_path)  # in the command line of each run
    results, words = tmp_path / "results.jsonl", [*TWO, "--results", tmp_path / "results.jsonl", "--", *QUICK]
    process = subprocess.Popen([*SWEEP, *words], env=environment(), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    wait(results.exists, 200, "a record")
    time.sleep(0.3)
    process.send_signal(how)
    assert process.wait(30) != 0
    left = [one for one in psutil.process_iter(["cmdline"]) if any(mark in word for word in one.info["cmdline"] or ())]
    assert how == signal.SIGKILL or not left, "a run ends with its sweep"
    psutil.wait_procs(left, 60)
    before = results.read_text()
    assert len(before.splitlines()) == 1  # on disk when it was done
    if how == signal.SIGKILL:
        results.write_text(before + before[:100])
    done = execute([*SWEEP, *words])
    assert done.code == 0 and "1 of 2 runs are in" in done.err, done.err
    assert results.read_text().startswith(before)
    records = [tuple(record[name] for name in sweep.KEY) for record in sweep.read(results)]
    assert len(records) == len(set(records)) == 2


@pytest.mark.check
@pytest.mark.fault
@pytest.mark.parametrize(("script", "said"), [
    ("echo '{\"ranks\": 1}' > results.jsonl", "1 ranks were started: .* has to heed RANKS"),
    ("sleep 50", "no end after 1 s"), ("echo one; echo two; exit 3", "two")])
def test_a_run_that_gives_no_record_says_why(script, said, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "command", lambda run, results, _: (["bash", "-c", script], results.parent, {}))
    started = time.monotonic()
    found = sweep.measure({"ranks": 2, "site": "here"}, Namespace(
        results=tmp_path / "r.jsonl", script="submit.slurm", timeout=1))
    assert re.fullmatch(f"{said}.*", found["failed"]) and time.monotonic() - started < 20


@pytest.mark.fault
@pytest.mark.parametrize(("words", "said"), [
    (["weak", "--chapters", "07_nothing"], "07_nothing is no chapter"),
    (["strong", "--ranks", "3"], "--batch-size 64 is no multiple of 3 ranks"),
    (["weak", "--results", "/proc/nope"], "cannot write /proc/nope"),
    (["weak", "--script", "submit.pbs", "--", "--data-dir", "my data"], "none may hold a blank, a wildcard")])
def test_a_mistake_is_one_line(words, said, tmp_path):
    done = execute([*SWEEP, "--results", tmp_path / "r", *words])
    assert done.code == 2 and said in done.err and "Traceback" not in done.err


@pytest.mark.check
def test_what_is_remarkable_is_flagged():
    def runs(ranks, *speeds):
        return [{"study": "weak", "chapter": "03_ddp", "flags": "", "host": "vm", "ranks": ranks, "batch": 64,
                 "nodes": 1, "cpus": 2, "device": "cpu", "processor": "a CPU", "images_per_second": speed,
                 "repeat": repeat, "site": "here", "steps": 35 if ranks > 1 else 12}
                for repeat, speed in enumerate(speeds)]

    records = [*runs(1, 99, 100, 101), *runs(2, 215, 220, 225), *runs(4, 300, 400, 405)]
    records.append(records[0] | {"failed": "no end", "images_per_second": None})
    found = sweep.summary(pandas.DataFrame(records)).set_index("ranks")
    assert found.efficiency.to_dict() == {1: 1.0, 2: 1.1, 4: 1.0} and set(found.repeats) == {3}
    assert found.remarks.to_dict() == {1: "7 timed steps", 2: "efficiency above 1.05",
                                       4: "more ranks than cores; spread 26%"}
    assert "spread 26%" in sweep.table(pandas.DataFrame(records))
