"""A checkpoint is the old one or the new one, whole, whatever happens while it is written."""

import os
import re
import shutil
import subprocess

import pytest
from conftest import case, execute, needs_root, refused, run

from submit.study import command

pytestmark = pytest.mark.fault
slow = [pytest.mark.slow]
kinds = pytest.mark.parametrize("chapter", [  # of files and of folders
    case("03_ddp"), case("02_horovod/tensorflow", marks=slow), case("05_zero", marks=slow),
    case("05_zero/fsdp.py", marks=slow)])


def ranks_of(chapter):
    return 1 if "tensorflow" in chapter else 2


def flags(chapter, epochs, checkpoint, *more):
    """An epoch is three steps, and is saved at its end."""
    network = ["--width", 32, "--layers", 2] if chapter.startswith("05") else []
    return [*network, "--global-batch-size", 478, "--epochs", epochs, "--checkpoint", checkpoint,
            *more]


def train(chapter, *words, hook=()):
    return run(chapter, ranks_of(chapter), *flags(chapter, *words), hook=hook, timeout=100)


def whole(checkpoint):
    """Return {name: bytes} of a checkpoint: of its file, or of the folder that latest names."""
    if checkpoint.is_file():
        return {"": checkpoint.read_bytes()}
    place = checkpoint / (checkpoint / "latest").read_text()
    return {str(path.relative_to(place)): path.read_bytes()
            for path in sorted(place.rglob("*")) if path.is_file()}


@kinds
def test_a_kill_while_it_is_written_leaves_the_old_or_the_new_one(chapter, tmp_path):
    """In its first byte, in its middle, before it takes the old one's place, and after."""
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    old = whole(checkpoint)
    middle = max(map(len, old.values())) // 2
    for when in 0, middle, "before", "after":
        done = train(chapter, 2, checkpoint, "--resume", "auto", hook=["limited.py", when])
        assert done.code != 0, (when, done.out)
        assert (whole(checkpoint) == old) == (when != "after"), when
    done = train(chapter, 3, checkpoint, "--resume", "auto")
    assert done.code == 0 and "steps: 6 of 9 done" in done.out, done.err


@kinds
def test_another_training_s_and_half_a_checkpoint_are_refused_and_left_alone(chapter, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    before = whole(checkpoint)
    program = "fsdp.py" if chapter.endswith("fsdp.py") else "main.py"
    network = ["--layers", 3] if chapter.startswith("05") else ["--model", "resnet18"]
    for other, had in (["--seed", 1], "seed 0"), (network, "(layers 2|model cnn)"):
        done = train(chapter, 2, checkpoint, "--resume", *other)
        refused(done, f"--resume: .* had --{had}", program)
    assert whole(checkpoint) == before
    part = checkpoint
    if checkpoint.is_dir():
        part = max(checkpoint.glob("*/*_1_*"), key=os.path.getsize)  # rank 1's alone
    os.truncate(part, part.stat().st_size // 2)
    before = whole(checkpoint)
    done = train(chapter, 2, checkpoint, "--resume")
    assert done.code != 0 and "epoch" not in done.out and whole(checkpoint) == before, done


# On a file system of its own

USER = ["--user", "--map-root-user"] if os.getuid() else []


def may_mount():
    words = ["unshare", "--mount", *USER, "true"]
    return shutil.which("unshare") and subprocess.run(words, capture_output=True).returncode == 0


def within(mount, words):
    """Return the words of a command that runs where this is mounted, for itself alone."""
    return ["unshare", "--mount", *USER, "sh", "-c", f'{mount} && exec "$@"', "sh", *words]


own_mounts = needs_root(None if may_mount() else "this kernel allows no mount of a test's own")


@own_mounts
@pytest.mark.slow
@pytest.mark.parametrize("chapter", ["03_ddp", "05_zero"])
def test_a_full_disk_leaves_the_old_one(chapter, tmp_path):
    """A file system with room for one checkpoint and half of another."""
    saved, disk, after = tmp_path / "saved", tmp_path / "disk", tmp_path / "after"
    assert train(chapter, 1, saved).code == 0
    blocks = sum(1 + len(content) // 4096 for content in whole(saved).values())
    room = 4096 * (8 + blocks * 3 // 2)  # 8: folders
    disk.mkdir()
    mount = (f"mount -t tmpfs -o size={room} none {disk} && cp -r {saved} {disk}/checkpoint "
             f"&& cd {disk}")
    keep = f'"$@"; code=$?; cp -r {disk}/checkpoint {after}; exit $code'
    words = command(chapter, 2, *flags(chapter, 2, disk / "checkpoint", "--resume"))
    done = execute(within(mount, ["sh", "-c", keep, "sh", *words]), timeout=100)
    assert done.code not in (0, 2) and "images/s" in done.out, done
    full = "No space left|file write failed|iostream error|unexpected pos"
    assert re.search(full, done.err), done.err
    assert whole(after) == whole(saved)
