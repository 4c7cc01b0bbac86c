"""A checkpoint is the old one or the new one, whole, whatever happens while it is written; what is not is refused."""

import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from conftest import NO_NETWORK, PROGRAMS, ROOT, case, environment, execute, parameters, run
from forked import run as fork
from launch import command
from tolerances import FP64, close

FILES = "01_single_node", "01_single_node/main_tf.py", "02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp"
FOLDERS = "04_deepspeed", "05_zero", "05_zero/fsdp.py"
RANKS = {"01_single_node": 1, "01_single_node/main_tf.py": 1, "02_horovod/tensorflow": 1}  # elsewhere 2
NETWORK = {"05_zero": ["--width", 32, "--layers", 2], "05_zero/fsdp.py": ["--width", 32, "--layers", 2]}


def flags(chapter, epochs, checkpoint, *more):
    """An epoch is three steps, and is saved at its end."""
    fp64 = [] if chapter in ("04_deepspeed", "05_zero") else ["--precision", "fp64"]
    return [*NETWORK.get(chapter, []), *fp64, "--global-batch-size", 478, "--epochs", epochs,
            "--checkpoint", checkpoint, *more]


def train(chapter, *words, **options):
    return run(chapter, RANKS.get(chapter, 2), *flags(chapter, *words), **options)


def whole(checkpoint):
    """The bytes of all that is part of the checkpoint: the file, or the place of the folder that latest names."""
    if checkpoint.is_file():
        return {"": checkpoint.read_bytes()}
    place = checkpoint / (checkpoint / "latest").read_text()
    return {str(path): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def values(chapter, checkpoint):
    """All parameters in it, as one array."""
    if chapter != "05_zero/fsdp.py":
        return parameters(checkpoint)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    place = checkpoint / (checkpoint / "latest").read_text()
    dcp_to_torch_save(place, checkpoint / "together")
    model = torch.load(checkpoint / "together", weights_only=False)["model"]
    return np.concatenate([model[name].numpy().ravel() for name in sorted(model)])


@pytest.mark.parametrize(("chapter", "times"), [
    case(chapter, 20 if chapter == "03_ddp" else 6, marks=[pytest.mark.fault])
    for chapter in FILES + FOLDERS])
def test_a_kill_while_it_is_written_leaves_the_old_or_the_new_one(chapter, times, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    old = whole(checkpoint)
    largest = max(map(len, old.values()))
    words = command(chapter, 1, *flags(chapter, 2, checkpoint, "--resume", "auto"))[1:]
    for when in [largest * number // times for number in range(times)] + ["before"]:
        done = fork([PROGRAMS / "limited.py", when, *words], RANKS.get(chapter, 2), environment() | NO_NETWORK, 100)
        assert done.code != 0, (when, done.out)
        assert whole(checkpoint) == old, when
    done = fork([PROGRAMS / "limited.py", "after", *words], RANKS.get(chapter, 2), environment() | NO_NETWORK, 100)
    assert done.code != 0 and whole(checkpoint) != old
    done = train(chapter, 3, checkpoint, "--resume", "auto")
    assert done.code == 0 and "steps: 6 of 9 done" in done.out, done.err
    assert train(chapter, 3, tmp_path / "uninterrupted").code == 0
    close("parameters, fp64", abs(values(chapter, checkpoint) - values(chapter, tmp_path / "uninterrupted")).max(),
          FP64)


@pytest.mark.parametrize("chapter", [case(chapter, marks=[pytest.mark.fault])
                                     for chapter in ("02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp")])
def test_one_rank_writes_it(chapter, tmp_path):
    """Rank 1 would die if it put anything in place."""
    words = command(chapter, 1, *flags(chapter, 1, tmp_path / "checkpoint"))[1:]
    done = fork([PROGRAMS / "dying.py", 1, "checkpoint", "SIGKILL", *words], 2, environment() | NO_NETWORK, 100)
    assert done.code == 0 and (tmp_path / "checkpoint").is_file(), done.err
    other = command(chapter, 1, *flags(chapter, 1, tmp_path / "other"))[1:]
    assert fork([PROGRAMS / "dying.py", 0, "checkpoint", "SIGKILL", *other], 2, environment() | NO_NETWORK, 100).code


def namespaces():
    words = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.getuid() else []), "true"]
    return shutil.which("unshare") and subprocess.run(words, capture_output=True).returncode == 0


def within(mount, words):
    """The words of a command that runs where this is mounted, for itself alone."""
    user = ["--user", "--map-root-user"] if os.getuid() else []
    return ["unshare", "--mount", *user, "sh", "-c", f'{mount} && exec "$@"', "sh", *words]


own_mounts = pytest.mark.skipif(not namespaces(), reason="this kernel allows no mount of a test's own")


@own_mounts
@pytest.mark.parametrize("chapter", [case(chapter, marks=[pytest.mark.fault])
                                     for chapter in FILES + FOLDERS])
def test_a_full_disk_leaves_the_old_one(chapter, tmp_path):
    """A file system with room for one checkpoint and the half of another."""
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    old = whole(checkpoint)
    saved = tmp_path / "saved"
    shutil.move(checkpoint, saved)
    disk, pages = tmp_path / "disk", sum(1 + len(content) // 4096 for content in old.values())
    room = 4096 * (8 + pages * 3 // 2)  # 8: latest, and folders
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={room} none {disk} && cp -r {saved} {disk}/checkpoint && cd {disk}"
    train_on = command(chapter, RANKS.get(chapter, 2), *flags(chapter, 2, disk / "checkpoint", "--resume"))
    look = ["sh", "-c", f'"$@"; code=$?; cp -r {disk}/checkpoint {tmp_path}/after; exit $code', "sh", *train_on]
    done = execute(within(mount, look), timeout=100)
    assert done.code not in (0, 2) and "images/s" in done.out, done
    assert re.search("No space left|file write failed|iostream error|unexpected pos", done.err), done.err
    after = whole(tmp_path / "after")
    assert [*after.values()] == [*old.values()]


@own_mounts
@pytest.mark.parametrize("chapter", [case(chapter, marks=[pytest.mark.fault])
                                     for chapter in FILES + FOLDERS])
def test_a_folder_that_cannot_be_written_to_is_one_line_before_training(chapter, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert train(chapter, 1, folder / "checkpoint").code == 0
    old = whole(folder / "checkpoint")
    mount = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"
    done = execute(within(mount, command(chapter, RANKS.get(chapter, 2), *flags(
        chapter, 2, folder / "checkpoint", "--resume"))), timeout=100)
    assert done.code == 2 and re.fullmatch(r"\w+\.py: cannot write .*\n", done.err), done.err
    assert whole(folder / "checkpoint") == old and "images" not in done.out


def refused(chapter, checkpoint, said, *more):
    done = train(chapter, 2, checkpoint, "--resume", *more)
    assert done.code == 2 and re.fullmatch(rf"\w+\.py: .*{said}.*\n", done.err), done.err


@pytest.mark.parametrize("chapter", [case(chapter) for chapter in FILES + FOLDERS])
@pytest.mark.fault
def test_a_checkpoint_of_another_training_is_refused_by_name(chapter, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    before = whole(checkpoint)
    other = ["--layers", 3] if chapter in NETWORK else ["--model", "resnet18"]
    precision = ["--precision", "bf16" if chapter in ("04_deepspeed", "05_zero") else "fp32"]
    tries = [("model|layers", other), ("precision", precision), ("seed", ["--seed", 1]),
             ("global_batch_size", ["--global-batch-size", 100])]
    for said, more in tries:
        refused(chapter, checkpoint, f"checkpoint.*({said})", *more)
    assert whole(checkpoint) == before


def change(path, how):
    """Cut a file off, or empty it."""
    os.truncate(path, 0 if how == "empty" else path.stat().st_size // 2)


@pytest.mark.parametrize(("chapter", "how"), [
    case(chapter, how, marks=[pytest.mark.fault]) for chapter in FILES + FOLDERS
    for how in ("cut off", "empty")])
def test_what_is_not_whole_is_refused(chapter, how, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    assert train(chapter, 1, checkpoint).code == 0
    if checkpoint.is_dir():
        place = checkpoint / (checkpoint / "latest").read_text()
        change(max(place.rglob("*.*"), key=lambda path: path.stat().st_size), how)
    else:
        change(checkpoint, how)
    refused(chapter, checkpoint, "cannot continue from .*checkpoint")


class Payload:
    """Runs a program when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def with_payload(chapter, checkpoint, payload):
    """Put the payload where this chapter's checkpoint has a pickle."""
    if "_tf" in chapter or "tensorflow" in chapter:
        with np.load(checkpoint) as arrays:
            saved = dict(arrays)
        np.savez(checkpoint.with_suffix(".npz"), **saved | {"step": np.array(payload, dtype=object)})
        checkpoint.with_suffix(".npz").replace(checkpoint)
    else:
        torch.save(torch.load(checkpoint) | {"step": payload}, checkpoint)


@pytest.mark.parametrize("chapter", [case(chapter, marks=[pytest.mark.fault])
                                     for chapter in FILES])
def test_a_program_in_a_checkpoint_does_not_run(chapter, tmp_path):
    checkpoint, trace = tmp_path / "checkpoint", tmp_path / "it ran"
    assert train(chapter, 1, checkpoint).code == 0
    with_payload(chapter, checkpoint, Payload(trace))
    refused(chapter, checkpoint, "cannot continue from .*checkpoint")
    assert not trace.exists()


def test_what_a_checkpoint_of_deepspeed_may_do_is_said_on_its_pages():
    for name in "04_deepspeed", "05_zero":
        assert re.search("[Ll]oad only checkpoints that you wrote", (ROOT / name / "README.md").read_text(), re.S)
