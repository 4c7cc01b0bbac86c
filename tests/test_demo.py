"""The demo: a row as soon as it is measured, and what it says is true of its numbers."""

import subprocess
import sys

import pytest
from conftest import ROOT, execute, lines

from submit import study
from tools.measuring import demo

HOROVOD = "02_horovod/pytorch"
ONE = "1  PyTorch"
RUNS = [("01_single_node", ONE, 1, demo.EXACT, None), ("03_ddp", "3  DDP", 1, demo.EXACT, ONE),
        ("03_ddp", "3  DDP", 2, demo.EXACT, ONE), (HOROVOD, "2  Horovod", 2, demo.EXACT, ONE)]


def made_up(folder, chapter, name, ranks, flags, against):
    """Return the record of a run that was not made."""
    return {"images_per_second": 1000.0 * ranks, "test_accuracy": 0.98, "dataset": "digits",
            "speed_up": ranks if against else None, "difference": 0.0, "others": 0.01,
            "processor": "a CPU", "cpus": 2}


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Return what a demo of made-up runs depends on, a function that does it, and its folder."""
    chapters = []
    state = {"missing": None, "train": made_up}

    def train(folder, chapter, **run):
        chapters.append(chapter)
        return state["train"](folder, chapter, **run)

    def call():
        chapters.clear()
        demo.main()
        return list(chapters)

    def missing(chapter):
        return state["missing"] if chapter.startswith("02") else None

    monkeypatch.setattr(demo, "RUNS", RUNS)
    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "missing", missing)
    monkeypatch.setattr(sys, "argv", ["demo.py", str(tmp_path)])
    monkeypatch.setattr(study, "end_on_sigterm", lambda: None)
    return state, call, tmp_path


@pytest.mark.fault
@pytest.mark.parametrize("problem, message", [
    (KeyboardInterrupt(), "^interrupted"),
    (OSError(28, "No space left on device"), "No space left on device"),
    (subprocess.CalledProcessError(137, "mpiexec", output="its last words\n"),
     "exit code 137\nits last words\n")])
def test_what_was_measured_stays_and_the_next_demo_goes_on(problem, message, quick, capsys):
    state, call, folder = quick

    def train(folder, chapter, name, ranks, **run):
        if ranks == 2:
            raise problem
        return made_up(folder, chapter, name, ranks, **run)

    state["train"] = train
    expected = rf"{message}.*what was measured stays in .*, and the same command goes on"
    with pytest.raises(SystemExit, match=f"(?s){expected}"):
        call()
    assert len(lines(folder / "demo.jsonl.part")) == 2 and not (folder / "demo.jsonl").exists()
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("3  DDP                        1     1,000")

    state["train"] = made_up
    assert call() == ["03_ddp", HOROVOD]
    assert len(lines(folder / "demo.jsonl")) == 4
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "Two ranks were faster than one in 2 of 3 programs: from 1.00 to 2.00 times." in printed
    assert call() == [run[0] for run in RUNS]  # a demo that has ended begins again


def test_horovod_is_built_after_the_other_rows_and_left_out_without_a_compiler(
        quick, monkeypatch, capsys):
    state, call, folder = quick
    state["missing"] = "chapter 2 needs a C++ compiler"
    assert call() == ["01_single_node", "03_ddp", "03_ddp"]
    printed = capsys.readouterr().out
    assert "2  Horovod is left out: chapter 2 needs a C++ compiler" in printed

    def build(words, **options):
        assert words[-2:] == ["--venv", sys.prefix]
        assert "3  DDP                        2" in capsys.readouterr().out
        state["missing"] = None

    state["missing"] = "Horovod is not built yet: make setup"
    with monkeypatch.context() as patch:
        patch.setattr(demo.subprocess, "run", build)
        patch.setattr(study, "machine", lambda: {"git": "1", "host": "vm"})  # it runs git
        assert call()[-1] == HOROVOD
    assert len(lines(folder / "demo.jsonl")) == 4


def test_real_rows_are_equal(tmp_path):
    source = f"""import sys; from tools.measuring import demo
runs = [run for run in demo.RUNS if run[1] in ("1  PyTorch", "3  PyTorch's DDP")]
demo.RUNS = [(*run[:3], run[3] + " --epochs 1", run[4]) for run in runs]
sys.argv[1:] = [{str(tmp_path)!r}]; demo.main()"""
    done = execute([sys.executable, "-c", source], cwd=ROOT)
    assert done.code == 0, done.err
    single, double = lines(tmp_path / "demo.jsonl")
    assert single["difference"] is None and double["difference"] < demo.EQUAL
    assert double["speed_up"] > 0


def test_what_it_says_follows_its_numbers():
    def row(speed_up, **more):
        record = made_up(None, "03_ddp", "DDP", 2, "", None)
        return record | {"name": "DDP", "ranks": 2, "speed_up": speed_up} | more

    assert demo.verdict([row(None), row(1.5), row(0.5)]) == (
        "Two ranks were faster than one in 1 of 2 programs: from 0.50 to 1.50 times.")
    busy = demo.verdict([row(1.5, others=0.5), row(0.5, others=0.62)])
    assert "Other programs used 56% of the cores" in busy
    assert demo.row(row(1.5, difference=1e-9)).endswith("yes")
    assert demo.row(row(1.5, difference=1e-3)).endswith("NO")
