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
# A thread of gloo that outlives its process group asks for the interpreter's lock; where that is gone: SIGABRT.
# And a process that is forked beside such a thread may inherit its lock, and hang.
WATCH = """import atexit, glob, os, sys
os.register_at_fork(before=lambda: print("forks", file=sys.stderr))
names = lambda: [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
atexit.register(lambda: print("threads:", *names(), file=sys.stderr))
"""
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


def trained(script, out):
    """The parameters that a script has left, as {name: tensor}, and the lines that it printed."""
    return SimpleNamespace(weights=torch.load(script.parent / "digits.pt"), lines=out.splitlines())


def quickly_trained(name, folder, ranks, *changes):
    """The same of a changed copy that needs no launcher; and no workers, each of which a forked rank starts slowly."""
    workers = re.search(r"num_workers=.*?\)", (ROOT / "03_ddp" / name).read_text(), re.S).group()
    script = copy(name, folder, (workers, "num_workers=0)"), *changes)
    done = forked.run([script], ranks, environment(), timeout=120)
    assert done.code == 0, done.err
    return trained(script, done.out)


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


@pytest.mark.parametrize("launcher", ["python", "mpiexec", "torchrun"])
def test_the_conversion_trains_as_the_ordinary_script(launcher, ordinary, tmp_path):
    words = {"python": [sys.executable], "mpiexec": [BIN / "mpiexec", "-n", 2, sys.executable],
             "torchrun": [BIN / "torchrun", "--nproc-per-node", 2]}[launcher]
    script = copy(AFTER, tmp_path, ("import torch\n", f"import torch\n{WATCH}"))
    done = execute([*words, script], timeout=120)
    threads = re.findall("^threads:.*", done.err, re.M)
    assert done.code == 0 and threads and not any("gloo" in line for line in threads), done.err
    assert "forks" not in done.err
    found = trained(script, done.out)
    close("parameters, fp64", difference(found, ordinary), FP64)
    assert found.lines == ordinary.lines  # once, and not once a rank


@pytest.mark.parametrize(("old", "new"), [
    (WRAPPER, "model"), (SAMPLER, "shuffle=True,"), ("sampler.set_epoch(epoch)", "pass")],
    ids=["no wrapper", "no sampler", "no set_epoch"])
def test_a_broken_conversion_trains_otherwise(old, new, ordinary, tmp_path):
    apart("parameters, fp64", difference(quickly_trained(AFTER, tmp_path, 2, (old, new)), ordinary), FP64)


def test_what_is_not_gathered_is_printed_otherwise(ordinary, tmp_path):
    """The loss of rank 0 alone; and every image tested on every rank; and the names that the wrapper gives."""
    found = quickly_trained(
        AFTER, tmp_path, 2, ("sum(gather(loss_sum)) / world_size", "loss_sum"),
        ("range(rank, len(test), world_size)", "range(len(test))"), ("model.state_dict()", "ddp.state_dict()"))
    assert len(found.lines) == len(ordinary.lines)
    assert all(one != other for one, other in zip(found.lines, ordinary.lines))
    assert {name.removeprefix("module.") for name in found.weights} == set(ordinary.weights)
    assert not found.weights.keys() & ordinary.weights.keys()


def test_the_ordinary_script_learns_as_it_is(tmp_path):
    """Not a character changed: in fp32, with shuffle=True and all epochs."""
    done = execute([sys.executable, ROOT / "03_ddp" / BEFORE], cwd=tmp_path, timeout=120)
    assert done.code == 0, done.err
    *losses, accuracy = [float(line.split()[-1]) for line in done.out.splitlines()]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True) and accuracy > 0.9, done.out
    assert {"0.weight", "0.bias"} < torch.load(tmp_path / "digits.pt").keys()


def test_every_added_line_is_marked_and_no_other():
    before, after = code(BEFORE), code(AFTER)
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    added = [line for tag, _, _, first, end in blocks if tag != "equal" for line in after[first:end]]
    assert [line for line in added if MARK not in line] == []
    assert [line for line in after if MARK in line] == added
    assert 12 <= len(added) <= 22
    ordinary = "\n".join(before)
    assert not [word for word in (MARK, "ranks", "workshop", "distributed") if word in ordinary]
