"""A rank that is killed while saving leaves the old checkpoint or the new one, complete."""

import os
import sys

import pytest
from conftest import BIN, ROOT, assert_refused, case, gpt_flags, run, run_command

pytestmark = pytest.mark.fault
slow = [pytest.mark.slow]
checkpoint_chapters = pytest.mark.parametrize("chapter", [  # some save files, some folders
    case("03_ddp"), case("05_zero", marks=slow), case("05_zero/fsdp.py", marks=slow)])


def flags(chapter, epochs, checkpoint, *more_flags):
    """Return flags of a training with three steps per epoch, saved after each epoch."""
    network, batch = [], 478
    if chapter.startswith("05"):
        network, batch = gpt_flags(checkpoint.parent), 138
    return [*network, "--global-batch-size", batch, "--epochs", epochs, "--checkpoint", checkpoint,
            *more_flags]


def train(chapter, *arguments, hook=()):
    """Run a chapter with the flags that these arguments give."""
    return run(chapter, 2, *flags(chapter, *arguments), hook=hook, timeout=100)


def read_checkpoint(checkpoint):
    """Return {name: bytes} of a checkpoint file, or of the folder that `latest` names."""
    if checkpoint.is_file():
        return {"": checkpoint.read_bytes()}
    folder = checkpoint / (checkpoint / "latest").read_text()
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_file()}


@checkpoint_chapters
def test_a_kill_while_saving_leaves_a_complete_checkpoint(chapter, tmp_path):
    """Kill while writing the first byte, halfway, just before and just after the rename."""
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    old = read_checkpoint(checkpoint)
    middle = max(map(len, old.values())) // 2
    for moment in 0, middle, "before", "after":
        result = train(chapter, 2, checkpoint, "--resume", "auto", hook=["limited.py", moment])
        assert result.code != 0, (moment, result.out)
        is_old = read_checkpoint(checkpoint) == old
        assert is_old == (moment != "after"), moment
    result = train(chapter, 3, checkpoint, "--resume", "auto")
    assert result.code == 0 and "steps: 6 of 9 done" in result.out, result.err


def test_a_checkpoint_that_only_one_rank_sees_is_refused(tmp_path):
    """As on two nodes whose --checkpoint is on a disk of each node."""
    for rank in "01":
        (tmp_path / rank).mkdir()
    assert train("03_ddp", 1, tmp_path / "0" / "c").code == 0
    result = run_command([BIN / "mpiexec", "-n", 2, "bash", "-c", 'cd "$PMI_RANK" && exec "$@"',
                          "bash", sys.executable, ROOT / "03_ddp" / "main.py",
                          *flags("03_ddp", 3, "c", "--resume", "auto")], cwd=tmp_path)
    assert_refused(result, "main.py: --resume: not every rank sees c")


@checkpoint_chapters
def test_a_truncated_checkpoint_or_one_of_other_settings_is_refused(chapter, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    bytes_before = read_checkpoint(checkpoint)
    network = ["--layers", 3] if chapter.startswith("05") else ["--model", "resnet18"]
    for flag, setting in (["--seed", 1], "seed 0"), (network, "(layers 2|model cnn)"):
        result = train(chapter, 2, checkpoint, "--resume", *flag)
        assert_refused(result, f"--resume: .* trained with --{setting}")
    assert read_checkpoint(checkpoint) == bytes_before
    file = checkpoint
    if checkpoint.is_dir():
        file = max(checkpoint.glob("*/*_1_*"), key=os.path.getsize)  # only rank 1's
    os.truncate(file, file.stat().st_size // 2)
    bytes_before = read_checkpoint(checkpoint)
    result = train(chapter, 2, checkpoint, "--resume")
    assert result.code != 0 and "epoch" not in result.out, result
    assert read_checkpoint(checkpoint) == bytes_before
