"""A user's mistake: one line that says what to do, exit code 2, nothing written, no rank left. Deaths end the job."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import CHAPTERS, NO_NETWORK, environment, observe, parameters, record, run
from launch import ROOT, command
from test_data import write_mnist

ON = {"01_single_node": 1, "03_ddp": 2}
MISTAKES = [  # flags, with {} for a folder; what the line has to say
    ("--dataset cifar", "--dataset.*cifar.*digits"),
    ("--model vgg", "--model.*vgg.*cnn"),
    ("--batch-size 0", "--batch-size.*0.*above 0"),
    ("--batch-size many", "--batch-size.*many"),
    ("--epochs -1", "--epochs.*-1"),
    ("--batch-size 8 --global-batch-size 16", "not allowed with"),
    ("--btach-size 8", "--btach-size"),
    ("--batch-size 1438", "1437 training images.*--dataset synthetic"),
    ("--dataset mnist --data-dir {}", "mnist.*network.*--dataset digits"),
    ("--dataset svhn --data-dir {}", "svhn.*network.*--dataset digits"),
    ("--dataset mnist --data-dir {}/broken", "mnist.*--data-dir"),
    ("--checkpoint {}/missing/file", "cannot write .*missing/file"),
    ("--checkpoint {}", "cannot write"),
    ("--results {}/missing/file", "cannot write .*missing/file"),
    ("--resume", "--checkpoint"),
    ("--resume --checkpoint {}/none", "none does not exist.*--resume"),
    ("--checkpoint {}/checkpoint", "exists.*--resume"),
    ("--resume --checkpoint {}/half", "half"),
    ("--resume --checkpoint {}/foreign", "foreign"),
    ("--resume --checkpoint {}/checkpoint --model resnet18", "checkpoint.*'model': 'cnn'"),
    ("--resume --checkpoint {}/checkpoint --global-batch-size 32", "checkpoint.*'global_batch_size': 64"),
    ("--device cuda", "no GPU.*--device cpu"),
    ("--image-size 3", "--image-size"),
    ("--lr -1", "--lr has to be above 0"),
    ("--lr nan", "--lr has to be above 0"),
    ("--warmup-epochs -3", "--warmup-epochs"),
    ("--lr 1e12 --epochs 1", "nan in epoch 1.*--lr"),
]
if torch.cuda.is_available():
    MISTAKES = [mistake for mistake in MISTAKES if "cuda" not in mistake[0]]


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a good checkpoint (of one rank), half of it, a file of something else, and a broken MNIST."""
    folder = tmp_path_factory.mktemp("files")
    record("01_single_node", 1, "--max-steps", 2, "--checkpoint", folder / "checkpoint", folder=folder)
    good = (folder / "checkpoint").read_bytes()
    (folder / "half").write_bytes(good[:len(good) // 2])
    torch.save({"weights": torch.zeros(3)}, folder / "foreign")
    images = write_mnist(folder / "broken") / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:5000])
    return folder


def refused(done, said):
    assert done.code == 2, (done.code, done.err)
    assert len(done.err.splitlines()) == 1 and done.err.startswith("main.py: "), done.err
    assert re.search(said, done.err), done.err


@pytest.mark.parametrize("chapter", CHAPTERS)
@pytest.mark.parametrize(("flags", "said"), MISTAKES, ids=[flags for flags, _ in MISTAKES])
def test_mistake(chapter, flags, said, files):
    before = tree(files)
    refused(run(chapter, ON[chapter], *flags.format(*[files] * flags.count("{}")).split(), cwd=files), said)
    assert tree(files) == before


def test_global_batch_has_to_divide():
    refused(run("03_ddp", 3, "--global-batch-size", 64), "multiple of the 3 ranks")


def test_the_largest_batch_that_fits_is_named_and_fits(tmp_path):
    done = run("03_ddp", 3, "--batch-size", 480)
    refused(done, "at most --batch-size 479 fits")
    assert record("03_ddp", 3, "--batch-size", 479, "--epochs", 1, folder=tmp_path)["global_batch_size"] == 1437


def test_bf16_is_refused_on_a_gpu_that_cannot(tmp_path):
    """There is none here: torch is made to believe in one."""
    refused(observe(ROOT / "01_single_node" / "main.py", 1, tmp_path, "--precision", "bf16",
                    env={"FAKE_GPUS": "1,same"}), "no bf16 on this GPU")


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_a_rank_that_dies_ends_the_job_and_resume_reaches_the_same(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    flags = "--global-batch-size", 48, "--precision", "fp64", "--checkpoint", checkpoint
    job = subprocess.Popen(command("03_ddp", 3, *flags, "--epochs", 2000), env=environment() | NO_NETWORK,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait(checkpoint.exists, 60, "first checkpoint")
    ranks = {pid: env for pid, env in alive(str(checkpoint)).items() if b"PMI_RANK=1\0" in env}
    os.kill(next(iter(ranks)), signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait(timeout=60) != 0
    assert time.monotonic() - killed < 15
    wait(lambda: not alive(str(checkpoint)), 5, "no rank is left")
    done = torch.load(checkpoint)["step"] // 29 + 1  # whole epochs of 29 steps behind it, and one more
    assert run("03_ddp", 2, *flags, "--epochs", done, "--resume").code == 0
    record("01_single_node", 1, "--global-batch-size", 48, "--precision", "fp64", "--epochs", done, "--checkpoint",
           tmp_path / "whole", folder=tmp_path)
    difference = (parameters(checkpoint) - parameters(tmp_path / "whole")).abs().max().item()
    assert difference <= 1e-9  # after many epochs fp64's own rounding has grown a little


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_an_error_on_one_rank_alone_ends_the_job(tmp_path):
    """Not a mistake of the user's: one traceback, and MPI ends the others within seconds."""
    source = (ROOT / "03_ddp" / "main.py").read_text()
    broken = source.replace("    step_seconds = []\n", "    step_seconds = []\n    assert rank != 1, 'only here'\n")
    assert broken != source
    (tmp_path / "main.py").write_text(broken)
    started = time.monotonic()
    done = observe(tmp_path / "main.py", 3, tmp_path / "seen")
    assert done.code not in (0, 2) and done.err.count("Error: only here") == 1 and time.monotonic() - started < 60
    wait(lambda: not alive(str(tmp_path)), 5, "no rank is left")


def test_many_runs_of_four_ranks_end_with_0():
    """The README's command for 200 of them found none that aborts; this is a watch, not the proof."""
    codes = [run("03_ddp", 4, "--max-steps", 1).code for _ in range(3)]
    assert codes == [0] * 3
