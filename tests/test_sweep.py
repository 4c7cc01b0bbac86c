"""The sweep: every run recorded once, whatever interrupts it; what is remarkable is flagged."""

import json
import signal
import subprocess
import sys
import time

import pandas
import pytest
import sweep
from conftest import ROOT, chapters, environment, execute, lines
from test_slurm import cluster, real_slurm  # noqa: F401

SWEEP = [sys.executable, ROOT / "submit" / "sweep.py"]
QUICK = ["--max-steps", "2", "--device", "cpu"]
FOUR = ["batch", "--chapters", "01_single_node", "--batch-sizes", "32", "64", "--repeats", "2"]  # runs


def keys(path):
    return sorted(tuple(record[name] for name in sweep.KEY) for record in lines(path) if "failed" not in record)


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
    results, words = tmp_path / "results.jsonl", [*FOUR, "--results", tmp_path / "results.jsonl", "--", *QUICK]
    process = subprocess.Popen([*SWEEP, *words], env=environment(), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not results.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(how)
    assert process.wait(30) != 0
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


def test_what_failed_is_recorded_named_and_tried_again(tmp_path, monkeypatch):
    results = tmp_path / "results.jsonl"
    words = ["batch", "--chapters", "01_single_node", "--batch-sizes", 64, 2000, "--repeats", 1, "--results", results,
             "--", *QUICK]
    first = execute([*SWEEP, *words])
    assert first.code == 1 and "1 of 2 runs failed" in first.err
    assert "digits has 1437 training images" in first.err and "Traceback" not in first.err
    assert [record.get("failed", "")[:8] for record in lines(results)] == ["", "main.py:"]
    second = execute([*SWEEP, *words])
    assert second.code == 1 and "1 of 2 runs are in" in second.err and len(lines(results)) == 3


def test_a_dry_run_prints_commands_that_work(tmp_path):
    words = [*FOUR, "--results", tmp_path / "results.jsonl", "--dry-run", "--", *QUICK]
    printed = execute([*SWEEP, *words]).out.splitlines()
    assert len(printed) == 4 and not (tmp_path / "results.jsonl").exists()
    done = execute(["bash", "-c", printed[0]], cwd=ROOT, env={"VENV": sys.prefix})
    assert done.code == 0, done.err
    assert lines(tmp_path / "results.jsonl")[0]["batch_size"] == 32


@pytest.mark.parametrize(("words", "said"), [
    (["weak", "--chapters", "07_nothing"], "07_nothing is no chapter"), (["weekly"], "invalid choice: 'weekly'"),
    (["strong", "--ranks", "3"], "--batch-size 64 is no multiple of 3 ranks"),
    (["weak", "--results", "/nowhere/r.jsonl"], "cannot write /nowhere/r.jsonl")])
def test_a_mistake_is_one_line(words, said, tmp_path):
    done = execute([*SWEEP, *words, *([] if "--results" in words else ["--results", tmp_path / "r"])])
    assert done.code == 2 and said in done.err and "Traceback" not in done.err


def test_what_is_remarkable_is_flagged():
    def runs(ranks, *speeds):
        return [{"study": "weak", "chapter": "03_ddp", "flags": "", "host": "vm", "ranks": ranks, "batch": 64,
                 "nodes": 1, "cpus": 2, "device": "cpu", "processor": "a CPU", "images_per_second": speed,
                 "repeat": repeat}
                for repeat, speed in enumerate(speeds)]

    records = [*runs(1, 99, 100, 101), *runs(2, 215, 220, 225), *runs(4, 300, 400, 405)]
    records.append(records[0] | {"failed": "no end", "images_per_second": None})
    found = sweep.summary(pandas.DataFrame(records)).set_index("ranks")
    assert found.efficiency.to_dict() == {1: 1.0, 2: 1.1, 4: 1.0} and set(found.repeats) == {3}
    assert found.remarks.to_dict() == {1: "", 2: "efficiency above 1.05", 4: "more ranks than cores; spread 26%"}
    assert "spread 26%" in sweep.table(pandas.DataFrame(records))


@real_slurm
@chapters("02_horovod/pytorch", "03_ddp")
def test_a_sweep_within_one_allocation(chapter, cluster, tmp_path):  # noqa: F811
    """The nodes come from the allocation: one rank takes one of them, two ranks take both."""
    results, words = tmp_path / "results.jsonl", ("weak", "--chapters", chapter, "--ranks", 1, 2, "--repeats", 1)
    job = cluster.sbatch("-N", 2, "--ntasks-per-node=1", (*words, "--results", results, "--", *QUICK), chapter="submit",
                         script="sweep.slurm")
    state, printed = cluster.end(job, "submit")
    assert state == "COMPLETED 0:0", printed
    assert [(record["ranks"], record["nodes"]) for record in lines(results)] == [(1, 1), (2, 2)]
    assert json.loads(results.read_text().splitlines()[0])["launcher"] == "launch of sites/slurm_cpu.sh"


@real_slurm
def test_a_sweep_within_one_allocation_of_pbs(cluster, tmp_path):  # noqa: F811
    results = tmp_path / "results.jsonl"
    flags = ("weak", "--ranks", 4, 8, "--repeats", 1, "--results", results, "--", *QUICK)
    job = cluster.qsub("-l", "select=2:system=polaris", flags=flags, chapter="submit", script="sweep.pbs", PALS_PPN="4")
    state, printed = cluster.end(job, "submit")
    assert state == "COMPLETED 0:0", printed
    assert [(record["ranks"], record["nodes"]) for record in lines(results)] == [(4, 1), (8, 2)]
