"""An ordinary script and its conversion to DDP: the same training on one rank and on two."""

import re

import forked
import pytest
import torch
from conftest import ROOT, copy_of, environment, skip_without
from tolerances import FP64, close

BEFORE, AFTER = "your_script.py", "your_script_ddp.py"
ORDER = """from torch.utils.data import DistributedSampler

class Order(DistributedSampler):
    '''DistributedSampler's order on one rank, another each epoch.'''
    def __iter__(self):
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)
"""


def copy(name, folder, *changes):
    """Return a copy of a script that trains two epochs in fp64, with weights in its own folder.

    Its loaders have no workers, which forked ranks start slowly.
    """
    workers = re.search(r"num_workers=.*?\)", (ROOT / "03_ddp" / name).read_text(), re.S).group()
    return copy_of(
        "03_ddp", folder, (".float()", ".double()"), (workers, "num_workers=0)"),
        ("10)).to(device)", "10)).double().to(device)"),
        ("range(5)", "range(2)"), ('"digits.pt"', repr(str(folder / "digits.pt"))), *changes,
        name=name)


def weights_and_lines(script, done):
    assert done.code == 0, done.err
    return torch.load(script.parent / "digits.pt"), done.out.splitlines()


@pytest.fixture(scope="module")
def baseline_run(tmp_path_factory):
    """Run the ordinary script with DistributedSampler's order of images."""
    folder = tmp_path_factory.mktemp("ordinary")
    (folder / "order.py").write_text(ORDER)
    script = copy(BEFORE, folder, ("shuffle=True", "sampler=Order(train, 1, 0)"),
                  ("import torch\n", "import torch\nfrom order import Order\n"))
    return weights_and_lines(script, forked.run([script], 1, environment(), timeout=120))


def test_the_conversion_trains_as_the_ordinary_script(baseline_run, tmp_path):
    script = copy(AFTER, tmp_path)
    done = forked.run([script], 2, environment(), timeout=120)
    weights, lines = weights_and_lines(script, done)
    expected_weights, expected_lines = baseline_run
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        close("parameters, fp64", (weights[name] - tensor).abs().max().item(), FP64)
    assert lines == ["2 ranks on cpu", *expected_lines]  # once, and not once per rank


@pytest.mark.slow
@skip_without("02_horovod")
def test_tensorflow_script_agrees_on_one_and_two_ranks(tmp_path):
    script = copy_of(
        "02_horovod/tensorflow", tmp_path, ("hvd.init()", "hvd.init()\nkeras.config.set_floatx"
        "('float64')"), ("range(5)", "range(2)"), (":.4f}, test", ":.12f}, test"),
        name="your_script.py")
    printed = [forked.run([script], ranks, environment(), timeout=120, cwd=tmp_path)
               for ranks in (1, 2)]
    losses = [re.findall(r"loss (\S+), test accuracy (\S+)", done.out) for done in printed]
    assert len(losses[0]) == 2, printed[0].err
    for (one, accuracy), (two, other_accuracy) in zip(*losses):
        close("loss, fp64, TensorFlow", abs(float(one) - float(two)), FP64)
        assert accuracy == other_accuracy
