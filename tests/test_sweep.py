"""The sweep: every run recorded once, whatever interrupts it; what is remarkable is flagged."""

import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter

import pandas
import psutil
import pytest
import sweep
from conftest import ROOT, environment, execute, lines
from launch import missing
from test_mistakes import wait

SWEEP = [sys.executable, ROOT / "submit" / "sweep.py"]
QUICK = ["--max-steps", "2", "--device", "cpu"]
FOUR = ["batch", "--chapters", "01_single_node", "--batch-sizes", "32", "64", "--repeats", "2"]  # runs


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


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_sweep_goes_on_where_it_was(how, tmp_path):
    """Killed during the second run of four; the file's last line is cut off, too, where it dies at once."""
    mark = str(tmp_path)  # in the command line of each run
    results, words = tmp_path / "results.jsonl", [*FOUR, "--results", tmp_path / "results.jsonl", "--", *QUICK]
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
    assert done.code == 0 and "1 of 4 runs are in" in done.err, done.err
    assert results.read_text().startswith(before)
    records = [tuple(record[name] for name in sweep.KEY) for record in sweep.read(results)]
    assert len(records) == len(set(records)) == 4
    again = execute([*SWEEP, *words])
    assert again.code == 0 and "4 of 4 runs are in" in again.err and len(sweep.read(results)) == 4


def test_what_failed_is_recorded_named_and_tried_again(tmp_path):
    results = tmp_path / "results.jsonl"
    words = ["batch", "--chapters", "01_single_node", "--batch-sizes", 64, 2000, "--repeats", 1, "--results", results,
             "--", *QUICK]
    first = execute([*SWEEP, *words])
    assert first.code == 1 and "1 of 2 runs failed" in first.err
    assert "digits has 1437 training images" in first.err and "Traceback" not in first.err
    assert [record.get("failed", "")[:8] for record in lines(results)] == ["", "main.py:"]
    second = execute([*SWEEP, *words])
    assert second.code == 1 and "1 of 2 runs are in" in second.err and len(lines(results)) == 3


@pytest.mark.parametrize(("script", "said"), [
    ("echo '{\"ranks\": 1}' > results.jsonl", "1 ranks were started: .* has to heed RANKS"),
    ("sleep 50", "no end after 1 s"), ("echo one; echo two; exit 3", "two"), ("exit 3", "exit code 3")])
def test_a_run_that_gives_no_record_says_why(script, said, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "command", lambda run, results, _: (["bash", "-c", script], results.parent, {}))
    started = time.monotonic()
    found = sweep.measure({"ranks": 2, "site": "here"}, Namespace(
        results=tmp_path / "r.jsonl", script="submit.slurm", timeout=1))
    assert re.fullmatch(f"{said}.*", found["failed"]) and time.monotonic() - started < 20


def test_a_dry_run_prints_commands_that_work(tmp_path):
    words = [*FOUR, "--results", tmp_path / "results.jsonl", "--dry-run", "--", *QUICK]
    printed = execute([*SWEEP, *words]).out.splitlines()
    assert len(printed) == 4 and not (tmp_path / "results.jsonl").exists()
    done = execute(["bash", "-c", printed[0]], cwd=ROOT)
    assert done.code == 0, done.err
    assert lines(tmp_path / "results.jsonl")[0]["batch_size"] == 32


@pytest.mark.parametrize(("words", "said"), [
    (["weak", "--chapters", "07_nothing"], "07_nothing is no chapter"), (["weekly"], "invalid choice: 'weekly'"),
    (["strong", "--ranks", "3"], "--batch-size 64 is no multiple of 3 ranks"),
    (["weak", "--results", "/proc/no/r.jsonl"], "cannot write /proc/no/r.jsonl"),
    (["weak", "--results", "/proc/nope"], "cannot write /proc/nope"),
    (["weak", "--results", "/tmp"], "cannot write /tmp"), (["weak", "--ranks", "0"], "'0' is not a whole number"),
    (["weak", "--chapters", "01_single_node", "--ranks", "2"], "nothing to run")])
def test_a_mistake_is_one_line(words, said, tmp_path):
    done = execute([*SWEEP, *words, *([] if "--results" in words else ["--results", tmp_path / "r"])])
    assert done.code == 2 and said in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("word", ["a b", "a\tb", "a*", "a?", "[ab]", "'a'", '"a"', "a\\b"])
def test_what_a_pbs_script_cannot_pass_on_is_refused(word, tmp_path, monkeypatch, capsys):
    """In a flag, or in the folder of the records, which the runs get as a flag."""
    (tmp_path / word).mkdir()
    for results, flags in (tmp_path / "r", ["--data-dir", word]), (tmp_path / word / "r", []):
        monkeypatch.setattr(sys, "argv", ["sweep.py", "weak", "--script", "submit.pbs", "--results", str(results),
                                          "--", *flags])
        with pytest.raises(SystemExit) as end:
            sweep.parse_args()
        said = capsys.readouterr().err.splitlines()[-1]
        assert end.value.code == 2 and "none may hold a blank" in said and not list(tmp_path.rglob("r"))
        monkeypatch.setattr(sys, "argv", [*sys.argv[:2], *sys.argv[4:]])  # submit.slurm passes words
        assert sweep.parse_args().flags[:len(flags)] == flags


def test_blanks_and_wildcards_arrive_whole_by_way_of_slurm_s_scripts(tmp_path):
    folder = tmp_path / "my results"
    folder.mkdir()
    done = execute([*SWEEP, "batch", "--chapters", "01_single_node", "--batch-sizes", 64, "--repeats", 1, "--results",
                    folder / "r.jsonl", "--", "--device", "cpu", "--epochs", 1, "--checkpoint", folder / "a  b*"])
    assert done.code == 0 and len(lines(folder / "r.jsonl")) == 1, done.err
    assert (folder / "a  b*").is_file()


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


@pytest.mark.skipif(bool(missing("02_horovod")), reason=str(missing("02_horovod")))
@pytest.mark.parametrize("study", ["batch", "weak", "strong"])
def test_the_command_under_a_figure_makes_its_records(study, monkeypatch):
    """Runs of the same settings as are recorded, each in three repeats or more, 30 timed steps each."""
    path = f"assets/records/{study}.jsonl"
    records = lines(ROOT / path)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", shlex.split(sweep.command_line(path).replace("\\\n", " "))[1:])
    planned = {tuple(run.values()) for run in sweep.plan(sweep.parse_args())}
    found = [tuple(record[name] for name in sweep.KEY) for record in records]
    assert len(found) == len(set(found)) and set(found) <= planned
    repeats = Counter(run[:-1] for run in found)
    assert repeats.keys() == {run[:-1] for run in planned} and min(repeats.values()) >= 3
    assert all(record["steps"] == 35 for record in records)
    assert len({(record["host"], record["processor"]) for record in records}) == 1
