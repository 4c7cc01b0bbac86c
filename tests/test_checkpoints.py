"""A checkpoint is the old one or the new one, whole, whatever happens while it is written; what is not is refused."""

import os
import re
import shutil
import subprocess

import pytest
from conftest import NO_NETWORK, PROGRAMS, case, environment, execute, needs_root, run
from forked import run as fork

from submit.study import command

pytestmark = pytest.mark.fault

RANKS = {"02_horovod/tensorflow": 1}  # elsewhere 2
PERCEPTRON = "--width", 32, "--layers", 2
slow = [pytest.mark.slow]
kinds = pytest.mark.parametrize("chapter", [  # of files and of folders
    case("03_ddp"), case("02_horovod/tensorflow", marks=slow), case("05_zero", marks=slow),
    case("05_zero/fsdp.py", marks=slow)])


def flags(chapter, epochs, checkpoint, *more):
    """An epoch is three steps, and is saved at its end."""
    network = PERCEPTRON if chapter.startswith("05") else []
    return [*network, "--global-batch-size", 478, "--epochs", epochs, "--checkpoint", checkpoint, *more]


def train(chapter, *words):
    return run(chapter, RANKS.get(chapter, 2), *flags(chapter, *words), timeout=100)


def whole(checkpoint):
    """The bytes of all that is part of the checkpoint: the file, or the place of the folder that latest names."""
    if checkpoint.is_file():
        return {"": checkpoint.read_bytes()}
    place = checkpoint / (checkpoint / "latest").read_text()
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


@kinds
def test_a_kill_while_it_is_written_leaves_the_old_or_the_new_one(chapter, tmp_path):
    """Killed within its first byte, within its middle, before it takes the old one's place, and after."""
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    old = whole(checkpoint)
    words = command(chapter, 1, *flags(chapter, 2, checkpoint, "--resume", "auto"))[1:]
    for when in 0, max(map(len, old.values())) // 2, "before", "after":
        done = fork([PROGRAMS / "limited.py", when, *words], RANKS.get(chapter, 2), environment() | NO_NETWORK, 100)
        assert done.code != 0, (when, done.out)
        assert (whole(checkpoint) == old) == (when != "after"), when
    done = train(chapter, 3, checkpoint, "--resume", "auto")
    assert done.code == 0 and "steps: 6 of 9 done" in done.out, done.err


def namespaces():
    words = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.getuid() else []), "true"]
    return shutil.which("unshare") and subprocess.run(words, capture_output=True).returncode == 0


def within(mount, words):
    """The words of a command that runs where this is mounted, for itself alone."""
    user = ["--user", "--map-root-user"] if os.getuid() else []
    return ["unshare", "--mount", *user, "sh", "-c", f'{mount} && exec "$@"', "sh", *words]


own_mounts = needs_root(None if namespaces() else "this kernel allows no mount of a test's own")


@own_mounts
@pytest.mark.slow
@pytest.mark.parametrize("chapter", ["03_ddp", "05_zero"])
def test_a_full_disk_leaves_the_old_one(chapter, tmp_path):
    """A file system with room for one checkpoint and the half of another."""
    saved, disk, after = tmp_path / "saved", tmp_path / "disk", tmp_path / "after"
    assert train(chapter, 1, saved).code == 0
    room = 4096 * (8 + sum(1 + len(content) // 4096 for content in whole(saved).values()) * 3 // 2)  # 8: folders
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={room} none {disk} && cp -r {saved} {disk}/checkpoint && cd {disk}"
    train_on = command(chapter, 2, *flags(chapter, 2, disk / "checkpoint", "--resume"))
    look = ["sh", "-c", f'"$@"; code=$?; cp -r {disk}/checkpoint {after}; exit $code', "sh", *train_on]
    done = execute(within(mount, look), timeout=100)
    assert done.code not in (0, 2) and "images/s" in done.out, done
    assert re.search("No space left|file write failed|iostream error|unexpected pos", done.err), done.err
    assert whole(after) == whole(saved)


@kinds
def test_another_training_s_and_half_a_checkpoint_are_refused_and_left_alone(chapter, tmp_path):
    """On all ranks, also where one rank's part alone is cut off."""
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    before = whole(checkpoint)

    def refused(said, *more):
        done = train(chapter, 2, checkpoint, "--resume", *more)
        assert done.code == 2 and re.fullmatch(rf"\w+\.py: cannot continue from .*checkpoint{said}.*\n", done.err), (
            done.err)

    refused(".*had --seed 0", "--seed", 1)
    network = ["--layers", 3] if chapter.startswith("05") else ["--model", "resnet18"]
    refused(".*had --(layers 2|model cnn)", *network)
    assert whole(checkpoint) == before
    part = max(checkpoint.glob("*/*_1_*"), key=os.path.getsize) if checkpoint.is_dir() else checkpoint
    os.truncate(part, part.stat().st_size // 2)
    refused("")
