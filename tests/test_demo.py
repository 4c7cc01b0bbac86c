"""The demo prints each row when it is measured, and its summary matches the numbers."""

import sys

import pytest
from conftest import ROOT, read_records, run_command

from cluster import study
from tools.measuring import demo

BASELINE = "1  PyTorch"
RUNS = [("01_single_node", BASELINE, 1, demo.EXACT, None),
        ("03_ddp", "3  DDP", 2, demo.EXACT, BASELINE),
        ("02_horovod/pytorch", "2  Horovod", 2, demo.EXACT, BASELINE)]


def fake_record(folder, chapter, name, ranks, flags, against):
    """Return a record as train() would."""
    return {"images_per_second": 1000.0 * ranks, "test_accuracy": 0.98, "dataset": "digits",
            "speed_up": ranks if against else None, "difference": 0.0, "others": 0.01,
            "processor": "a CPU", "cpus": 2}


@pytest.fixture
def fake_demo(tmp_path, monkeypatch):
    """Return the folder of a demo whose runs are fake."""
    monkeypatch.setattr(demo, "RUNS", RUNS)
    monkeypatch.setattr(demo, "train", fake_record)
    monkeypatch.setattr(demo, "missing", lambda chapter: None)
    monkeypatch.setattr(sys, "argv", ["demo.py", str(tmp_path)])
    monkeypatch.setattr(study, "end_on_sigterm", lambda: None)
    return tmp_path


@pytest.mark.fault
@pytest.mark.parametrize(("problem", "message"), [
    (KeyboardInterrupt(), "^interrupted"),
    (OSError(28, "No space left on device"), "No space left on device")])
def test_an_interrupted_demo_resumes(problem, message, fake_demo, monkeypatch, capsys):
    def train(folder, chapter, **run):
        if chapter == "03_ddp":
            raise problem
        return fake_record(folder, chapter, **run)

    expected = rf"(?s){message}.*completed runs are in .*; run the same command to resume"
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=expected):
        patch.setattr(demo, "train", train)
        demo.main()
    assert len(read_records(fake_demo / "demo.jsonl.part")) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("1  PyTorch     ")
    demo.main()
    names = [record["name"] for record in read_records(fake_demo / "demo.jsonl")]
    assert names == [name for _, name, *_ in RUNS]
    assert (fake_demo / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert not (fake_demo / "demo.jsonl.part").exists()


def test_one_and_two_real_ranks_train_equally(tmp_path):
    source = f"""import sys; from tools.measuring import demo
runs = [run for run in demo.RUNS if run[1] in ("1  PyTorch", "3  PyTorch's DDP")]
demo.RUNS = [(*run[:3], run[3] + " --epochs 1", run[4]) for run in runs]
sys.argv[1:] = [{str(tmp_path)!r}]; demo.main()"""
    result = run_command([sys.executable, "-c", source], cwd=ROOT)
    assert result.code == 0, result.err
    one_rank, two_ranks = read_records(tmp_path / "demo.jsonl")
    assert one_rank["difference"] is None and two_ranks["difference"] < demo.EQUAL
    assert two_ranks["speed_up"] > 0


def test_summary_and_rows_match_the_numbers():
    record = fake_record(None, "03_ddp", "DDP", 2, "", None) | {"name": "DDP", "ranks": 2}
    records = [record | {"speed_up": speed_up, "others": 0.2} for speed_up in (None, 1.5, 0.5)]
    assert demo.verdict(records).startswith(
        "Two ranks were faster than one in 1 of 2 programs: speed-up 0.50 to 1.50. "
        "Other programs used 20% of the cores")
    assert demo.row(record | {"difference": 1e-9}).endswith("yes")
    assert demo.row(record | {"difference": 1e-3}).endswith("NO")
