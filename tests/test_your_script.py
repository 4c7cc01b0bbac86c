"""An ordinary script and its conversion to DDP: few marked lines, and the same training on one rank and on two."""

import difflib
import re
import sys
from types import SimpleNamespace

import forked
import pytest
import torch
from conftest import BIN, ROOT, copy_of, environment, execute
from tolerances import FP64, apart, close

BEFORE, AFTER = "your_script.py", "your_script_ddp.py"
MARK = "# DDP"
WRAPPER, SAMPLER = "nn.parallel.DistributedDataParallel(model)", "sampler=sampler,"
ORDER = """from torch.utils.data import DistributedSampler

class Order(DistributedSampler):
    '''DistributedSampler's order on one rank, another each epoch: shuffle=True draws from another generator.'''
    def __iter__(self):
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)
"""


def copy(name, folder, *changes):
    """A copy of a script that trains two epochs in fp64 and leaves its weights in its own folder."""
    return copy_of("03_ddp", folder, (".float()", ".double()"), ("10)).to(device)", "10)).double().to(device)"),
                   ("range(5)", "range(2)"), ('"digits.pt"', repr(str(folder / "digits.pt"))), *changes, name=name)


def trained(script, done):
    """The parameters that a script has left, as {name: tensor}, and the lines that it printed."""
    assert done.code == 0, done.err
    return SimpleNamespace(weights=torch.load(script.parent / "digits.pt"), lines=done.out.splitlines())


def quickly_trained(name, folder, ranks, *changes):
    """The same of a changed copy that needs no launcher; and no workers, each of which a forked rank starts slowly."""
    workers = re.search(r"num_workers=.*?\)", (ROOT / "03_ddp" / name).read_text(), re.S).group()
    script = copy(name, folder, (workers, "num_workers=0)"), *changes)
    return trained(script, forked.run([script], ranks, environment(), timeout=120))


def difference(one, other):
    """Of two trainings' parameters: the largest. They have to have the same names."""
    assert one.weights.keys() == other.weights.keys()
    return max((one.weights[name] - other.weights[name]).abs().max().item() for name in one.weights)


def code(name):
    """The lines of a script behind its docstring, without indentation and empty lines."""
    text = (ROOT / "03_ddp" / name).read_text().split('"""')[2]
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    """The ordinary script, where only the order of the images is that of DistributedSampler."""
    folder = tmp_path_factory.mktemp("ordinary")
    (folder / "order.py").write_text(ORDER)
    return quickly_trained(BEFORE, folder, 1, ("shuffle=True", "sampler=Order(train, 1, 0)"),
                           ("import torch\n", "import torch\nfrom order import Order\n"))


@pytest.mark.parametrize("launcher", [
    "forked", *[pytest.param(name, marks=pytest.mark.slow) for name in ("python", "mpiexec", "torchrun")]])
def test_the_conversion_trains_as_the_ordinary_script(launcher, ordinary, tmp_path):
    if launcher == "forked":
        found = quickly_trained(AFTER, tmp_path, 2)
    else:
        words = {"python": [sys.executable], "mpiexec": [BIN / "mpiexec", "-n", 2, sys.executable],
                 "torchrun": [BIN / "torchrun", "--nproc-per-node", 2]}[launcher]
        script = copy(AFTER, tmp_path)
        found = trained(script, execute([*words, script], timeout=120))
    close("parameters, fp64", difference(found, ordinary), FP64)
    assert found.lines == ordinary.lines  # once, and not once a rank


@pytest.mark.parametrize(("old", "new"), [
    (WRAPPER, "model"), (SAMPLER, "shuffle=True,"), ("sampler.set_epoch(epoch)", "pass")],
    ids=["no wrapper", "no sampler", "no set_epoch"])
def test_a_broken_conversion_trains_otherwise(old, new, ordinary, tmp_path):
    apart("parameters, fp64", difference(quickly_trained(AFTER, tmp_path, 2, (old, new)), ordinary), FP64)


@pytest.mark.check
def test_every_added_line_is_marked_and_no_other():
    before, after = code(BEFORE), code(AFTER)
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    added = [line for tag, _, _, first, end in blocks if tag != "equal" for line in after[first:end]]
    assert [line for line in added if MARK not in line] == []
    assert [line for line in after if MARK in line] == added
