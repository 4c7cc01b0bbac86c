"""The script to take home that shards with FSDP2: one training, on any number of ranks, resumed."""

import re
import shutil

import forked
import pytest
import torch
from conftest import PROGRAMS, copy_and_edit, environment
from tolerances import BFLOAT16, assert_close, assert_equal_in_fp64

STEPS, STOP = 8, 5  # SIGTERM comes before the stop; an epoch has 6 steps
SMALL = (('"layers": 3, "width": 96, "heads": 4, "context": 64',
          '"layers": 2, "width": 8, "heads": 2, "context": 8'),
         ("GLOBAL_BATCH = 32", "GLOBAL_BATCH = 12"),
         ("lr=0.003", "lr=3"),  # for smooth.py's Adam
         ("parameters(), 1.0", "parameters(), 0.1"),  # below the norms, so all steps are clipped
         ("step % 20", "step % 1"), (":.4f}, norm {norm:.4f}", ":.15f}, norm {norm:.15f}"))
STOPPED = (("            step += 1\n", """            step += 1
            if (step, rank) == (3, 1):
                os.kill(os.getpid(), signal.SIGTERM)
"""), ("import argparse\n", "import argparse\nimport os\nimport signal\n"))


def start(folder, ranks, *flags, changes=()):
    """Run a small, smooth variant in fp64. Return its exit code and output."""
    script = copy_and_edit("05_zero/your_script_fsdp.py", folder, *SMALL, *changes)
    (folder / "text.txt").write_bytes(bytes((7 * i * i + i // 9) % 251 for i in range(680)))
    command = [PROGRAMS / "smooth.py", script, "--precision", "fp64", "--text", "text.txt",
               "--steps", STEPS, *flags]
    return forked.run(command, ranks, environment() | {"PYTHONPATH": str(folder)}, 120, folder)


def train(folder, ranks, *flags, changes=()):
    """Train the variant. Return its weights, and each step's loss and norm."""
    result = start(folder, ranks, *flags, changes=changes)
    assert result.code == 0, result.err
    weights = torch.zeros(0)
    if (folder / "gpt.pt").exists():
        saved = torch.load(folder / "gpt.pt")
        weights = torch.cat([tensor.flatten() for tensor in saved.values()])
    numbers = re.findall(r"step \d+: loss (\S+), norm (\S+)", result.out)
    return weights, torch.tensor([[float(number) for number in pair] for pair in numbers],
                                 dtype=torch.float64)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """Return what one rank computes, with one micro-batch per step."""
    return train(tmp_path_factory.mktemp("baseline"), 1, "--micro-batch", "12")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the folder of checkpoints of two ranks, stopped by SIGTERM in mid-epoch."""
    folder = tmp_path_factory.mktemp("checkpoint")
    flags = "--checkpoint", folder / "saved", "--save-steps", 2
    _, numbers = train(folder, 2, *flags, changes=STOPPED)
    assert len(numbers) == STOP
    return folder / "saved"


def test_two_ranks_with_micro_batches_train_as_one_rank(baseline, tmp_path):
    weights, numbers = train(tmp_path, 2, "--micro-batch", "4")  # of 6: the second one is smaller
    assert len(numbers) == STEPS and numbers[:, 1].min() > 0.1
    assert_equal_in_fp64(numbers, baseline[1])
    assert_equal_in_fp64(weights, baseline[0])


@pytest.mark.parametrize(("ranks", "step"), [(1, STOP), (3, STOP), (2, 4)])
def test_any_number_of_ranks_resumes_within_an_epoch(baseline, checkpoint, tmp_path, ranks, step):
    """From the checkpoint at SIGTERM, or from one that a thread wrote while training went on."""
    shutil.copytree(checkpoint, tmp_path / "saved")
    if step < STOP:
        shutil.rmtree(tmp_path / "saved" / f"step{STOP:06}")
    weights, numbers = train(tmp_path, ranks, "--checkpoint", "saved")
    assert len(numbers) == STEPS - step
    assert_equal_in_fp64(numbers, baseline[1][step:])
    assert_equal_in_fp64(weights, baseline[0])


@pytest.mark.fault
def test_a_checkpoint_on_one_node_only_is_refused(checkpoint, tmp_path):
    other_disk = ("Path(args.checkpoint, f", "Path('x' if rank else args.checkpoint, f")
    result = start(tmp_path, 2, "--checkpoint", checkpoint, changes=[other_disk])
    assert result.code, result
    assert re.fullmatch("not every rank sees .*step000005: .*\n", result.err), result.err


def test_the_same_number_of_ranks_resumes_with_its_random_numbers(tmp_path):
    dropout = ("logits = model(tokens)", "logits = nn.functional.dropout(model(tokens), 0.5)")
    for name, starts in (("whole", [()]), ("parts", [STOPPED, ()])):
        (tmp_path / name).mkdir()
        for number, changes in enumerate(starts):
            weights, _ = train(tmp_path / name / str(number), 2, "--checkpoint",
                               tmp_path / name / "saved", changes=[dropout, *changes])
        if name == "whole":
            expected = weights
    assert_equal_in_fp64(weights, expected)


def test_bf16_trains(baseline, tmp_path):
    weights, numbers = train(tmp_path, 2, "--precision", "bf16")
    assert weights.dtype == torch.float32  # what the optimizer updates
    assert_close("loss, bf16", abs(numbers[0, 0] / baseline[1][0, 0] - 1).item(), BFLOAT16)
    first, last = baseline[1][[0, -1], 0]
    assert abs(numbers[-1, 0] - last) < (first - last) / 4  # it falls as in fp64
