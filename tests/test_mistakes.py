"""A user's mistake: one line that says what to do, exit code 2, nothing written, no rank left. Deaths end the job."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    BIN,
    NO_NETWORK,
    ON,
    case,
    chapters,
    copy_of,
    environment,
    in_one_process,
    observe,
    parameters,
    record,
    run,
)
from launch import command
from test_data import write_mnist
from tolerances import FP64, close

ARGUMENTS = [  # flags that parse_args() refuses, the same function everywhere; what the line has to say
    ("--dataset cifar", "--dataset.*cifar.*digits"),
    ("--model vgg", "--model.*vgg.*cnn"),
    ("--batch-size 0", "--batch-size.*0.*above 0"),
    ("--batch-size many", "--batch-size.*many"),
    ("--epochs -1", "--epochs.*-1"),
    ("--batch-size 8 --global-batch-size 16", "not allowed with"),
    ("--btach-size 8", "--btach-size"),
]
MISTAKES = [  # flags, with {} for a folder
    ("--epochs none", "--epochs.*none"),
    ("--batch-size 1438", "1437 training images, fewer than the .*--dataset synthetic"),
    ("--dataset mnist --data-dir {}", "mnist.*network.*--dataset digits"),
    ("--dataset svhn --data-dir {}", "svhn.*network.*--dataset digits"),
    ("--dataset mnist --data-dir {}/broken", "mnist.*--data-dir"),
    ("--checkpoint {}/missing/file", "cannot write .*missing/file"),
    ("--results {}/missing/file", "cannot write .*missing/file"),
    ("--resume", "--checkpoint"), ("--resume auto", "--checkpoint"), ("--resume never", "--resume.*never"),
    ("--resume --checkpoint {}/none", "there is no checkpoint .*none: leave out --resume"),
    ("--checkpoint {}/checkpoint", "exists.*--resume"),
    ("--resume --checkpoint {}/half", "half"),
    ("--resume --checkpoint {}/foreign", "foreign"),
    ("--resume --checkpoint {}/checkpoint --model resnet18", "checkpoint.*.model.: .cnn."),
    ("--resume --checkpoint {}/checkpoint --global-batch-size 32", "checkpoint.*.global_batch_size.: 64"),
    ("--device cuda", "no such GPU.*--device cpu"),
    ("--image-size 3", "--image-size"),
    ("--lr -1", "--lr has to be above 0"),
    ("--results {}/new --lr nan", "--lr has to be above 0"),
    ("--warmup-epochs -3", "--warmup-epochs"),
    ("--lr 1e12 --epochs 1", "nan in epoch 1.*--lr"),
]
if torch.cuda.is_available():
    MISTAKES = [mistake for mistake in MISTAKES if "cuda" not in mistake[0]]


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_files(base, folder):
    """A good checkpoint (of one rank), half of it, a file of something else, and a broken MNIST."""
    record(base, 1, "--epochs", 1, "--checkpoint", folder / "checkpoint", folder=folder)
    good = (folder / "checkpoint").read_bytes()
    (folder / "half").write_bytes(good[:len(good) // 2])
    torch.save({"weights": torch.zeros(3)}, folder / "foreign")
    images = write_mnist(folder / "broken") / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:5000])
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """make_files() as a function of the base, made once."""
    return functools.cache(lambda base: make_files(base, tmp_path_factory.mktemp("files")))


def refused(done, said):
    assert done.code == 2, (done.code, done.err)
    assert len(done.err.splitlines()) == 1 and re.match(r"(main(_tf)?|fsdp)\.py: ", done.err), done.err
    assert re.search(said, done.err), done.err


SOME = [mistake for mistake in MISTAKES if mistake[0] in (  # found by each of the functions, before and in training
    "--epochs none", "--batch-size 1438", "--dataset mnist --data-dir {}", "--checkpoint {}/checkpoint",
    "--resume --checkpoint {}/half", "--lr 1e12 --epochs 1")]


def base_of(chapter):
    return "01_single_node/main_tf.py" if re.search("tensorflow|_tf", chapter) else "01_single_node"


@pytest.mark.fault
@pytest.mark.parametrize(("chapter", "flags", "said"), [
    case(chapter, *mistake, id=f"{chapter} {mistake[0]}") for chapter in ON
    for mistake in (SOME[1:2] if chapter.startswith("01") else SOME[::2] if "tensorflow" in chapter else SOME)])
def test_mistake(chapter, flags, said, folders):
    files = folders(base_of(chapter))
    before = tree(files)
    refused(run(chapter, ON[chapter], *flags.format(*[files] * flags.count("{}")).split(), cwd=files), said)
    assert tree(files) == before


@pytest.mark.fault
@chapters("01_single_node", "01_single_node/main_tf.py")
def test_every_mistake_is_one_line_and_leaves_the_files_alone(chapter, folders):
    files = folders(base_of(chapter))
    before = tree(files)
    rows = [(flags.format(*[files] * flags.count("{}")), said) for flags, said in ARGUMENTS + MISTAKES]
    _, answers = in_one_process(chapter, [flags for flags, _ in rows], cwd=files)
    for (flags, said), answer in zip(rows, answers):
        assert isinstance(answer, str) and "\n" not in answer and re.search(said, answer), (flags, answer)
    assert tree(files) == before


@chapters("02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp", "04_deepspeed")
def test_global_batch_has_to_divide(chapter):
    refused(run(chapter, 3, "--global-batch-size", 64, launcher=True), "multiple of the 3 ranks")


def test_bf16_of_a_resnet_is_refused_where_its_gradients_are_random(tmp_path):
    """A convolution of stride 2 that gets one pixel: the gradient of its weights is what lay in memory."""
    flags = "--precision", "bf16", "--model", "resnet18", "--device", "cpu", "--max-steps", 1
    refused(run("03_ddp", 2, *flags), "16 pixels or fewer")
    refused(run("03_ddp", 2, *flags, "--dataset", "synthetic", "--image-size", 16), "16 pixels or fewer")
    assert run("03_ddp", 2, *flags, "--dataset", "synthetic", "--image-size", 17).code == 0


def alive(word):
    """The processes whose command line has this word in it, as pairs of process id and environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (path / "cmdline").read_bytes() and b"main.py" in (path / "cmdline").read_bytes():
                found[int(path.name)] = (path / "environ").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
    return found


def wait(condition, seconds, what):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    pytest.fail(f"not within {seconds} s: {what}")


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")


@linux
@pytest.mark.fault
@chapters("02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp")
def test_a_rank_that_dies_ends_the_job_and_resume_reaches_the_same(chapter, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    flags = "--global-batch-size", 48, "--precision", "fp64", "--lr", 0.001  # so low that rounding does not grow
    job = subprocess.Popen(command(chapter, 3, *flags, "--checkpoint", checkpoint, "--epochs", 2000,
                                   "--resume", "auto"),
                           env=environment() | NO_NETWORK, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait(checkpoint.exists, 60, "first checkpoint")
    ranks = {pid: env for pid, env in alive(str(checkpoint)).items() if b"PMI_RANK=1\0" in env}
    os.kill(next(iter(ranks)), signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait(timeout=60) != 0
    assert time.monotonic() - killed < 15
    wait(lambda: not alive(str(checkpoint)), 5, "no rank is left")
    step = int(np.load(checkpoint)["step"]) if "tensorflow" in chapter else torch.load(checkpoint)["step"]
    done = step // 29 + 1  # whole epochs of 29 steps behind it, and one more
    assert run(chapter, 2, *flags, "--epochs", done, "--checkpoint", checkpoint, "--resume", "auto").code == 0
    record("01_single_node/main_tf.py" if "tensorflow" in chapter else "01_single_node", 1, *flags, "--epochs", done,
           "--checkpoint", tmp_path / "whole", folder=tmp_path)
    close("parameters, fp64", abs(parameters(checkpoint) - parameters(tmp_path / "whole")).max(), FP64)


@linux
@chapters("02_horovod/pytorch", "02_horovod/tensorflow")
def test_a_rank_that_dies_ends_a_job_of_horovodrun(chapter, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    train = command(chapter, 1, "--epochs", 2000, "--checkpoint", checkpoint)
    words = [BIN / "horovodrun", "--gloo", "-np", "3", *train]
    job = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait(checkpoint.exists, 60, "first checkpoint")
    ranks = {pid: env for pid, env in alive(str(checkpoint)).items() if b"HOROVOD_RANK=1\0" in env}
    os.kill(max(ranks), signal.SIGKILL)  # a shell may be between
    killed = time.monotonic()
    assert job.wait(timeout=60) != 0
    assert time.monotonic() - killed < 15
    wait(lambda: not alive(str(checkpoint)), 5, "no rank is left")


@linux
@chapters("02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp")
def test_an_error_on_one_rank_alone_ends_the_job(chapter, tmp_path):
    """Not a mistake of the user's: one traceback, and the others end within seconds."""
    line = "    report.begin("
    main = copy_of(chapter, tmp_path / "copy", (line, f"    assert rank != 1, 'only here'\n{line}"))
    started = time.monotonic()
    done = observe(main, 3, tmp_path / "seen", launcher=True)
    assert done.code not in (0, 2) and done.err.count("Error: only here") == 1 and time.monotonic() - started < 60
    assert done.err.count("Traceback") == 1, done.err
    wait(lambda: not alive(str(tmp_path)), 5, "no rank is left")
