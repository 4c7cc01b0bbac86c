"""A rank that fails or is killed: the job ends, no rank is left, and --resume reaches what no death would have."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import NO_NETWORK, case, copy_of, environment, observe, parameters, record, run
from launch import command
from tolerances import FP64, close

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")


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


@linux
@pytest.mark.fault
@pytest.mark.parametrize("chapter", [case("03_ddp"), case("02_horovod/pytorch", marks=[pytest.mark.slow])])
def test_a_rank_that_dies_ends_the_job_and_resume_reaches_the_same(chapter, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    flags = "--global-batch-size", 48, "--precision", "fp64", "--lr", 0.001  # so low that rounding does not grow
    job = subprocess.Popen(command(chapter, 3, *flags, "--checkpoint", checkpoint, "--epochs", 2000,
                                   "--resume", "auto"), stdin=subprocess.DEVNULL,
                           env=environment() | NO_NETWORK, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait(checkpoint.exists, 60, "first checkpoint")
    ranks = {pid: env for pid, env in alive(str(checkpoint)).items() if b"PMI_RANK=1\0" in env}
    os.kill(next(iter(ranks)), signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait(timeout=60) != 0
    assert time.monotonic() - killed < 15
    wait(lambda: not alive(str(checkpoint)), 5, "no rank is left")
    done = torch.load(checkpoint)["step"] // 29 + 1  # whole epochs of 29 steps behind it, and one more
    assert run(chapter, 2, *flags, "--epochs", done, "--checkpoint", checkpoint, "--resume", "auto").code == 0
    record("01_single_node", 1, *flags, "--epochs", done, "--checkpoint", tmp_path / "whole", folder=tmp_path)
    close("parameters, fp64", abs(parameters(checkpoint) - parameters(tmp_path / "whole")).max(), FP64)


@linux
@pytest.mark.fault
def test_an_error_on_one_rank_alone_ends_the_job(tmp_path):
    """Not a mistake of the user's: one traceback, and the others end within seconds."""
    line = "    report.begin("
    main = copy_of("03_ddp", tmp_path / "copy", (line, f"    assert rank != 1, 'only here'\n{line}"))
    started = time.monotonic()
    done = observe(main, 2, tmp_path / "seen", launcher=True)
    assert done.code not in (0, 2) and done.err.count("Error: only here") == 1 and time.monotonic() - started < 60
    assert done.err.count("Traceback") == 1, done.err
    wait(lambda: not alive(str(tmp_path)), 5, "no rank is left")
