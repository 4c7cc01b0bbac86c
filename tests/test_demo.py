"""The demo trains one and two ranks equally, and its summary matches the numbers."""

import sys

from conftest import ROOT, read_records, run_command

from tools.measuring import demo


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
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_summary_and_rows_match_the_numbers():
    record = {"name": "DDP", "ranks": 2, "images_per_second": 2000.0, "test_accuracy": 0.98,
              "dataset": "digits", "speed_up": None, "others": 0.2}
    records = [record | {"speed_up": speed_up} for speed_up in (None, 1.5, 0.5)]
    assert demo.verdict(records).startswith(
        "Two ranks were faster than one in 1 of 2 programs: speed-up 0.50 to 1.50. "
        "Other programs used 20% of the cores")
    assert demo.row(record | {"difference": 1e-9}).endswith("yes")
    assert demo.row(record | {"difference": 1e-3}).endswith("NO")
