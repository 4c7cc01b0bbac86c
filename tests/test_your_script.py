"""An ordinary script and its conversion to DDP: the same training on one rank and on two."""

import re

import forked
import pytest
import torch
from conftest import ROOT, copy_and_edit, environment, skip_without
from tolerances import FP64, assert_close

ORDINARY, CONVERTED = "your_script.py", "your_script_ddp.py"
ORDER = """from torch.utils.data import DistributedSampler

class Order(DistributedSampler):
    '''DistributedSampler's order on one rank, in a new order each epoch.'''
    def __iter__(self):
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)
"""


def copy_for_fp64(name, folder, *changes):
    """Copy a script, to train two epochs in fp64 and save into its folder. Return its path.

    The loaders get no workers, because forked ranks start these slowly.
    """
    workers = re.search(r"num_workers=.*?\)", (ROOT / "03_ddp" / name).read_text(), re.S).group()
    return copy_and_edit(
        "03_ddp", folder, (".float()", ".double()"), (workers, "num_workers=0)"),
        ("10)).to(device)", "10)).double().to(device)"),
        ("range(5)", "range(2)"), ('"digits.pt"', repr(str(folder / "digits.pt"))), *changes,
        name=name)


def weights_and_lines(script, result):
    """Return the weights that a script saved, and the lines that it printed."""
    assert result.code == 0, result.err
    return torch.load(script.parent / "digits.pt"), result.out.splitlines()


@pytest.fixture(scope="module")
def baseline_run(tmp_path_factory):
    """Return weights and lines of the ordinary script, with DistributedSampler's image order."""
    folder = tmp_path_factory.mktemp("ordinary")
    (folder / "order.py").write_text(ORDER)
    script = copy_for_fp64(ORDINARY, folder, ("shuffle=True", "sampler=Order(train, 1, 0)"),
                           ("import torch\n", "import torch\nfrom order import Order\n"))
    return weights_and_lines(script, forked.run([script], 1, environment(), timeout=120))


def test_the_conversion_trains_as_the_ordinary_script(baseline_run, tmp_path):
    script = copy_for_fp64(CONVERTED, tmp_path)
    result = forked.run([script], 2, environment(), timeout=120)
    weights, lines = weights_and_lines(script, result)
    expected_weights, expected_lines = baseline_run
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        assert_close("parameters, fp64", (weights[name] - tensor).abs().max().item(), FP64)
    assert lines == ["2 ranks on cpu", *expected_lines]  # once, and not once per rank


@pytest.mark.slow
@skip_without("02_horovod")
def test_tensorflow_script_trains_alike_on_one_and_two_ranks(tmp_path):
    script = copy_and_edit(
        "02_horovod/your_script_tf.py", tmp_path,
        ("hvd.init()", "hvd.init()\nkeras.config.set_floatx('float64')"),
        ("range(5)", "range(2)"), (":.4f}, test", ":.12f}, test"))
    results = [forked.run([script], ranks, environment(), timeout=120, cwd=tmp_path)
               for ranks in (1, 2)]
    one_rank, two_ranks = [re.findall(r"loss (\S+), test accuracy (\S+)", result.out)
                           for result in results]
    assert len(one_rank) == 2, results[0].err
    for (loss, accuracy), (loss_of_two, accuracy_of_two) in zip(one_rank, two_ranks):
        assert_close("loss, fp64, TensorFlow", abs(float(loss) - float(loss_of_two)), FP64)
        assert accuracy == accuracy_of_two
