"""What the notebooks compute and draw is what another computation gives."""

import json
import sys

import pytest
from conftest import ROOT, execute
from tolerances import ARITHMETIC, ONE_DECIMAL

from tools.notebooks import memory


@pytest.mark.slow
def test_batch_size_trains_as_main_py_does(tmp_path):
    """After the first epoch, in separate processes: both have a main.py to import."""
    flags = ["--device", "cpu", "--epochs", "1", "--seed", "3", "--results", str(tmp_path / "record")]
    done = execute([sys.executable, "main.py", *flags], env={"OMP_NUM_THREADS": "1"}, cwd=ROOT / "01_single_node")
    assert done.code == 0, done.err
    program = ("from tools.measuring.steps_to_target import training; "
               "print(next(accuracy for step, loss, accuracy in training(64, rate=0.05, seed=3) if step == 22))")
    found = execute([sys.executable, "-c", program], env={"OMP_NUM_THREADS": "1"}, cwd=ROOT)
    assert found.code == 0, found.err
    assert float(found.out) == json.loads((tmp_path / "record").read_text())["test_accuracy"]


@pytest.mark.check
def test_model_state_is_the_paper_s():
    for ranks in (1, 2, 64):
        paper = [16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks]
        found = [memory.total(memory.state(stage, ranks)) for stage in range(4)]
        assert found == pytest.approx(paper, rel=ARITHMETIC)
    figure = [memory.total(memory.state(stage, 64, 7.5e9)) / 1e9 for stage in range(4)]
    assert figure == pytest.approx([120, 31.4, 16.6, 1.9], abs=ONE_DECIMAL)


@pytest.mark.check
@pytest.mark.parametrize("way", memory.WAYS)
def test_what_autograd_keeps_is_what_is_derived(way):
    assert memory.counted_activations(32, 3, way) == memory.expected_activations(32, 3, way)
