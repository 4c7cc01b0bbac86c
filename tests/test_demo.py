"""The demo trains one and two ranks equally, and draws its figure."""

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
