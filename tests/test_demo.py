"""The demo: a row as soon as it is measured, what was measured stays, and what it says is true of its numbers."""

import os
import signal
import subprocess
import sys
import time

import pytest
import runs
from conftest import ROOT, chapters, execute, lines

from tools.measuring import demo

HOROVOD = "02_horovod/pytorch"
ONE = "1  PyTorch"
RUNS = [("01_single_node", ONE, 1, demo.EXACT, None), ("03_ddp", "3  DDP", 1, demo.EXACT, ONE),
        ("03_ddp", "3  DDP", 2, demo.EXACT, ONE), (HOROVOD, "2  Horovod", 2, demo.EXACT, ONE)]


def made_up(chapter, name, ranks, flags, against, folder):
    """The record of a run that was not made."""
    return {"chapter": chapter, "ranks": ranks, "images_per_second": 1000.0 * ranks, "test_accuracy": 0.98,
            "dataset": "digits", "step_seconds": 0.064 / ranks, "difference": 0.0, "processor": "a CPU", "cpus": 2}


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """The demo in this process, with runs that are made up. call() returns the chapters that it has run."""
    tried = []
    state = {"missing": None, "train": made_up}

    def train(chapter, *run):
        tried.append(chapter)
        return state["train"](chapter, *run)

    def call():
        tried.clear()
        demo.main()
        return list(tried)

    monkeypatch.setattr(demo, "RUNS", RUNS)
    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "missing", lambda chapter: state["missing"] if chapter.startswith("02") else None)
    monkeypatch.setattr(sys, "argv", ["demo.py", str(tmp_path)])
    monkeypatch.setattr(demo, "end_with_the_study", lambda: None)
    return state, call, tmp_path


def test_what_was_measured_stays_and_the_next_demo_goes_on(quick, capsys):
    state, call, folder = quick
    begun = []

    def interrupted(*run):
        begun.append(run)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return made_up(*run)

    state["train"] = interrupted
    with pytest.raises(SystemExit, match=r"interrupted; what was measured stays in .*, and make demo goes on"):
        call()
    assert len(lines(folder / "demo.jsonl.part")) == 2 and not (folder / "demo.jsonl").exists()
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith("3  DDP                        1     1,000")
    state["train"] = made_up
    assert call() == ["03_ddp", HOROVOD]
    assert len(lines(folder / "demo.jsonl")) == 4 and (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "Two ranks were faster than one in 2 of 3 programs: from 1.00 to 2.00 times." in out
    assert call() == [run[0] for run in RUNS]  # all anew


def test_chapter_2_is_added_when_there_is_a_compiler(quick, capsys):
    state, call, folder = quick
    state["missing"] = "chapter 2 needs a C++ compiler"
    assert call() == ["01_single_node", "03_ddp", "03_ddp"]
    assert "chapter 2 is left out: chapter 2 needs a C++ compiler" in capsys.readouterr().out
    state["missing"] = None
    assert call() == [HOROVOD]
    assert len(lines(folder / "demo.jsonl")) == 4
    state["missing"] = "chapter 2 needs a C++ compiler"
    call()
    assert call() == ["01_single_node", "03_ddp", "03_ddp"]  # nothing new: all anew


def test_horovod_is_built_after_the_other_rows(quick, monkeypatch, capsys):
    state, call, _ = quick
    state["missing"] = "Horovod is not built yet: make setup"
    asked, real = [], subprocess.run

    def run(words, **options):
        if "tools/environment/setup.py" not in str(words):
            return real(words, **options)
        asked.append(words)
        assert "3  DDP                        2" in capsys.readouterr().out
        state["missing"] = None
        return None

    monkeypatch.setattr(demo.subprocess, "run", run)
    assert call()[-1] == HOROVOD and asked[0][-2:] == ["--venv", sys.prefix]


def test_a_full_disk_and_a_run_that_fails_are_one_line_and_nothing_is_lost(quick, monkeypatch):
    state, call, folder = quick
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=r"No space left.* make demo goes on"):
        patch.setattr(runs, "append", lambda *_: open("/dev/full", "w").write("x" * 10000))
        call()

    def killed(chapter, name, ranks, *run):
        if ranks == 2:
            raise subprocess.CalledProcessError(137, "mpiexec", output="its last words\n")
        return made_up(chapter, name, ranks, *run)

    state["train"] = killed
    with pytest.raises(SystemExit, match="exit code 137\nits last words\nwhat was measured stays"):
        call()
    assert len(lines(folder / "demo.jsonl.part")) == 2


def test_the_second_of_two_demos_is_refused(quick):
    _, _, folder = quick
    with demo.only_one(folder, pytest.fail):
        done = execute([sys.executable, "-m", "tools.measuring.demo", folder], cwd=ROOT)
    assert done.code == 2 and done.err == f"demo.py: another demo writes into {folder}: wait for its end\n"


@chapters(HOROVOD)
def test_real_rows_are_equal_and_appear_one_by_one(chapter, tmp_path):
    """Through a pipe; the third run is interrupted."""
    source = ("import sys; from tools.measuring import demo; "
              "demo.RUNS = [run for run in demo.RUNS if '1  PyTorch' in (run[1], run[4])]; "
              f"sys.argv[1:] = [{str(tmp_path)!r}]; demo.main()")
    process = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, start_new_session=True)
    for line in process.stdout:
        if line.startswith("3 "):
            assert len(lines(tmp_path / "demo.jsonl.part")) == 2 and process.poll() is None
            time.sleep(1)
            os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) and "interrupted" in process.stderr.read()
    done = execute([sys.executable, "-c", source], cwd=ROOT)
    assert done.code == 0 and "2 runs are in" in done.err, done.err
    records = lines(tmp_path / "demo.jsonl")
    assert [record["difference"] is None for record in records] == [True, False, False]
    assert max(record["difference"] for record in records[1:]) < demo.EQUAL
    assert min(record["test_accuracy"] for record in records) > 0.9


def row(speed, ranks=2, **more):
    return made_up("03_ddp", "", ranks, (), None, None) | {"name": "DDP", "speed_up": speed} | more


def test_what_it_says_follows_its_numbers():
    assert demo.verdict([row(None, 1), row(1.5), row(0.5)]).startswith(
        "Two ranks were faster than one in 1 of 2 programs: from 0.50 to 1.50 times.")
    assert "shared one core" in demo.verdict([row(0.5, cpus=1)]) and "shared" not in demo.verdict([row(0.5)])
    assert "other programs" in demo.verdict([row(12.3)]) and "other programs" not in demo.verdict([row(1.9)])
    assert demo.verdict([row(None, 1)]) == "No program ran on two ranks here."
    assert demo.row(row(1.5, difference=1e-9)).endswith("yes") and demo.row(row(1.5, difference=1e-3)).endswith("NO")
    assert demo.row(row(None, 1, difference=None)).endswith("98.0%")
    assert "98.0%" not in demo.row(row(1.5, dataset="synthetic"))


def test_the_table_fits_a_terminal():
    rows = [demo.COLUMNS, *(demo.row(row(1.5, name=run[1])) for run in demo.RUNS)]
    assert max(map(len, [*rows, *demo.HEAD.splitlines()])) <= 88
