"""A checkpoint is completely the old or the new one, whatever happens while it is written."""

import os

import pytest
import torch
from conftest import case, record, refused, run

pytestmark = pytest.mark.fault
slow = [pytest.mark.slow]
kinds = pytest.mark.parametrize("chapter", [  # checkpoints that are files, and folders
    case("03_ddp"), case("02_horovod/tensorflow", marks=slow), case("05_zero", marks=slow),
    case("05_zero/fsdp.py", marks=slow)])


def ranks_of(chapter):
    return 1 if "tensorflow" in chapter or chapter.startswith("01") else 2


def flags(chapter, epochs, checkpoint, *more):
    """Return flags: an epoch has three steps, and is saved at its end."""
    network = ["--width", 32, "--layers", 2] if chapter.startswith("05") else []
    return [*network, "--global-batch-size", 478, "--epochs", epochs, "--checkpoint", checkpoint,
            *more]


def train(chapter, *words, hook=()):
    return run(chapter, ranks_of(chapter), *flags(chapter, *words), hook=hook, timeout=100)


def read_checkpoint(checkpoint):
    """Return {name: bytes} of a checkpoint file, or of the folder that `latest` names."""
    if checkpoint.is_file():
        return {"": checkpoint.read_bytes()}
    folder = checkpoint / (checkpoint / "latest").read_text()
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_file()}


@kinds
def test_kill_while_saving_leaves_a_whole_checkpoint(chapter, tmp_path):
    """Kill while writing the first byte, halfway, just before and just after the rename."""
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    old = read_checkpoint(checkpoint)
    middle = max(map(len, old.values())) // 2
    for when in 0, middle, "before", "after":
        done = train(chapter, 2, checkpoint, "--resume", "auto", hook=["limited.py", when])
        assert done.code != 0, (when, done.out)
        assert (read_checkpoint(checkpoint) == old) == (when != "after"), when
    done = train(chapter, 3, checkpoint, "--resume", "auto")
    assert done.code == 0 and "steps: 6 of 9 done" in done.out, done.err


def test_a_checkpoint_of_a_gpu_continues_on_a_cpu(tmp_path):
    """A GPU's tensors are stored channels last, in another memory order."""
    losses = []
    for layout in torch.contiguous_format, torch.channels_last:
        checkpoint = tmp_path / f"{layout}"
        assert train("01_single_node", 1, checkpoint).code == 0
        saved = torch.load(checkpoint)
        momentum = [state["momentum_buffer"] for state in saved["optimizer"]["state"].values()]
        for tensor in [*saved["model"].values(), *momentum]:
            if tensor.ndim == 4:
                tensor.data = tensor.to(memory_format=layout)
        torch.save(saved, checkpoint)
        words = flags("01_single_node", 2, checkpoint, "--resume")
        losses.append(record("01_single_node", 1, *words, folder=tmp_path)["loss"])
    assert losses[0] == losses[1]


@kinds
def test_foreign_or_truncated_checkpoint_is_refused(chapter, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    before = read_checkpoint(checkpoint)
    program = "fsdp.py" if chapter.endswith("fsdp.py") else "main.py"
    network = ["--layers", 3] if chapter.startswith("05") else ["--model", "resnet18"]
    for other, setting in (["--seed", 1], "seed 0"), (network, "(layers 2|model cnn)"):
        done = train(chapter, 2, checkpoint, "--resume", *other)
        refused(done, f"--resume: .* trained with --{setting}", program)
    assert read_checkpoint(checkpoint) == before
    part = checkpoint
    if checkpoint.is_dir():
        part = max(checkpoint.glob("*/*_1_*"), key=os.path.getsize)  # only rank 1's
    os.truncate(part, part.stat().st_size // 2)
    before = read_checkpoint(checkpoint)
    done = train(chapter, 2, checkpoint, "--resume")
    assert done.code != 0 and "epoch" not in done.out, done
    assert read_checkpoint(checkpoint) == before
