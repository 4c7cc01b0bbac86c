"""An ordinary script and its conversion to DDP: the same training on one rank and on two."""

import re
import sys

import forked
import numpy as np
import pytest
import torch
from conftest import (
    PROGRAMS,
    ROOT,
    assert_refused,
    copy_and_edit,
    environment,
    run,
    run_command,
    run_for_record,
    skip_without,
)
from tolerances import assert_equal_in_fp64

ORDINARY, CONVERTED = "your_script.py", "your_script_ddp.py"
FIVE_EPOCHS = {ORDINARY: "range(5)", CONVERTED: "len(train_loader), 5)"}
DROPOUT = ("nn.Flatten(),\n", "nn.Flatten(), nn.Dropout(),\n")
STOPPED = ("            step += 1\n", """            step += 1
            if rank == 1 and step in (31, 37):  # of 44
                os.kill(os.getpid(), signal.SIGTERM)
""")
OWN_DISK = ("parse_args()\n", """parse_args()
    if args.checkpoint and os.environ.get("RANK", "0") != "0":
        args.checkpoint += " of another node"
""")
IN_VAIN = ("            step += 1\n", """            step += 1
            if step == 2 and rank == 1:  # rank 0 waits for it in the next step
                dist.recv(pid := torch.zeros(1, dtype=torch.int), 0)
                os.kill(pid.item(), signal.SIGTERM)
                dist.recv(pid, 0)
            elif step == 2:
                dist.send(torch.tensor([os.getpid()], dtype=torch.int), 1)
""")
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
        (FIVE_EPOCHS[name], FIVE_EPOCHS[name].replace("5", "2")),
        ('"digits.pt"', repr(str(folder / "digits.pt"))), *changes, name=name)


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
    assert_equal_in_fp64(weights, expected_weights)
    assert lines == ["2 ranks on cpu", *expected_lines]  # once, and not once per rank


def train_in_parts(folder, all_ranks, *changes):
    """Train on each number of ranks in turn, and return the weights. Only rank 0 sees the file."""
    script = copy_for_fp64(CONVERTED, folder, OWN_DISK, *changes)
    for number, ranks in enumerate(all_ranks, 1):
        result = forked.run([script, "--checkpoint", folder / "c"], ranks, environment(), 120)
        assert result.code == 0, result.err
        assert (folder / "digits.pt").exists() == (number == len(all_ranks))
    return torch.load(folder / "digits.pt")


def test_other_numbers_of_ranks_go_on_within_the_epoch(baseline_run, tmp_path):
    """SIGTERM stops the first two jobs in the second epoch."""
    assert_equal_in_fp64(train_in_parts(tmp_path, [2, 4, 1], STOPPED), baseline_run[0])


def test_a_stopped_training_goes_on_with_its_random_numbers(tmp_path):
    parts = train_in_parts(tmp_path / "parts", [2, 2, 2], DROPOUT, STOPPED)
    assert_equal_in_fp64(parts, train_in_parts(tmp_path / "whole", [2], DROPOUT))


def test_package_does_not_import_pytorch_into_a_tensorflow_program():
    """Both in one process may crash."""
    program = ("import sys, workshop.data, workshop.flags, workshop.report; "
               "sys.exit('torch' in sys.modules)")
    assert run_command([sys.executable, "-c", program], cwd=ROOT).code == 0

@pytest.mark.fault
def test_sigterm_ends_ranks_that_wait_in_vain(tmp_path):
    script = copy_for_fp64(CONVERTED, tmp_path, IN_VAIN, ("catch_sigterm()", "catch_sigterm(1)"))
    result = forked.run([script, "--checkpoint", "c"], 2, environment(), 60, tmp_path)
    assert result.code == 1 and result.err.count("SIGTERM: waited 1 s") == 1, result


def test_the_losses_of_the_page_of_traps_have_one_rank_s_gradient():
    arguments = [PROGRAMS / "traps.py", ROOT / "03_ddp" / "YOUR_SCRIPT_TRAPS.md",
                 ROOT / "03_ddp" / CONVERTED]
    result = forked.run(arguments, 2, environment(), timeout=90)
    assert result.code == 0, result.err


@pytest.mark.slow
@skip_without("02_horovod")
def test_tensorflow_program_trains_alike_on_one_and_two_ranks(tmp_path):
    records, weights = [], []
    for ranks in 1, 2:
        checkpoint = tmp_path / f"{ranks}.npz"
        records.append(run_for_record(
            "02_horovod/main_tf.py", ranks, "--precision", "fp64", "--epochs", 2,
            "--global-batch-size", 48, "--checkpoint", checkpoint, folder=tmp_path, launcher=True))
        weights.append(np.load(checkpoint))
    assert records[0]["test_accuracy"] == records[1]["test_accuracy"]
    assert_equal_in_fp64(weights[1], dict(weights[0]))
    pytorch = run_for_record("01_single_node", 1, "--max-steps", 1, folder=tmp_path)
    assert all(records[0][key] == pytorch[key] for key in ("parameters", "images", "dataset"))


@pytest.mark.slow
@skip_without("02_horovod")
def test_tensorflow_program_without_a_network_says_where_to_put_mnist(tmp_path):
    result = run("02_horovod/main_tf.py", 2, "--dataset", "mnist", launcher=True, timeout=120,
                 env={"KERAS_HOME": str(tmp_path)})
    assert_refused(result, "KERAS_HOME.*--dataset digits")
    assert "epoch" not in result.out
