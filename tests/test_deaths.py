"""If one rank is killed, stopped or fails, the job soon ends with an error that says why.

It leaves no process behind, and --resume equals an uninterrupted run.
"""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import BIN, NO_NETWORK, ROOT, case, copy_of, environment, parameters, run, wait
from tolerances import FP64, close

from submit.study import command

pytestmark = pytest.mark.fault

PATIENCE = 20  # seconds: --timeout of ranks that wait for a stopped one
SOON = 150  # seconds
LAUNCHERS = {"mpiexec": ["mpiexec", "-n", 2, sys.executable],
             "torchrun": ["torchrun", "--nproc-per-node", 2]}
FAILED = {"mpiexec": r"PID \d+ RUNNING AT .*\n=   EXIT CODE: 9\n",  # their messages on rank 1
          "torchrun": r"Root Cause .*\n\[\d\]:\n.*\n.*\n  rank      : 1 "}
TIMED_OUT = r"[Tt]imed out|Timeout \("
slow = pytest.mark.slow


def start(launcher, words, folder, **options):
    """Start two ranks of `python WORDS`; the folder marks the processes and gets the output."""
    name, *flags = LAUNCHERS[launcher]
    env = environment() | NO_NETWORK | {
        "MARK": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}"}
    with open(folder / "printed", "a") as printed:
        return subprocess.Popen([str(word) for word in (BIN / name, *flags, *words)], env=env,
                                stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
                                **options)


def processes_of_job(folder):
    """Return the processes that start() marked with this folder."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == str(folder):
                processes.append(process)
        except psutil.Error:  # it has ended, or belongs to another user
            continue
    return processes


def wait_for_end(job, folder, seconds=SOON):
    """Wait for the job and all its processes to end. Return its exit code and output."""
    code = job.wait(seconds)
    wait(lambda: not processes_of_job(folder), 20, "the end of all processes")
    return code, (folder / "printed").read_text()


@pytest.fixture
def folder(tmp_path):
    """A folder for start(); processes left by a failed test are killed."""
    yield tmp_path
    for process in processes_of_job(tmp_path):
        process.kill()


def copy_with_fault(chapter, folder, condition, death):
    """Copy a chapter with a fault before a backward pass. Return its main.py."""
    backward = "            loss.backward()"
    return copy_of(chapter, folder / "copy", (backward, f"""\
            if {condition}:
                {death}
{backward}"""))


@pytest.mark.parametrize(("chapter", "launcher", "death"), [
    case("03_ddp", "mpiexec", "SIGKILL", marks=[slow, pytest.mark.core]),
    case("03_ddp", "mpiexec", "SIGSTOP"),
    case("02_horovod/pytorch", "mpiexec", "SIGSTOP", marks=[slow]),
    case("03_ddp", "torchrun", "SIGKILL", marks=[pytest.mark.core])])
def test_a_death_ends_the_job_and_is_reported(chapter, launcher, death, folder):
    """Rank 1 dies in its fourth step; the other waits for it in the all-reduce."""
    stops = death == "SIGSTOP"
    main = copy_with_fault(chapter, folder, "rank == 1 and step == 3",
                           f"os.kill(os.getpid(), {signal.Signals[death]:d})")
    job = start(launcher, [main, *["--timeout", PATIENCE] * stops], folder)
    code, printed = wait_for_end(job, folder, 300)
    assert code not in (0, 2) and "ranks: 2," in printed
    assert re.search(TIMED_OUT if stops else FAILED[launcher], printed), printed


@pytest.mark.parametrize("chapter", [case("03_ddp"), case("02_horovod/pytorch", marks=[slow])])
def test_resume_after_a_kill_equals_an_uninterrupted_run(
        chapter, folder, trained):
    """Killed at any point, and continued on another number of ranks."""
    flags = "--precision", "fp64", "--lr", 0.001  # so low that rounding errors do not grow
    common = ("--global-batch-size", 48, "--checkpoint", folder / "c", "--resume", "auto", *flags)
    words = command(chapter, 3, *common, "--epochs", 2000)
    job = subprocess.Popen(words, env=environment() | {"MARK": str(folder)},
                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
    wait((folder / "c").exists, 300, "first checkpoint")
    next(process for process in processes_of_job(folder)
         if process.environ().get("PMI_RANK") == "1").kill()
    assert job.wait(SOON) != 0
    wait(lambda: not processes_of_job(folder), 20, "the end of all ranks")
    epochs = torch.load(folder / "c")["step"] // 29 + 1  # one more than was saved
    assert run(chapter, 2, *common, "--epochs", epochs).code == 0
    one = trained("01_single_node", *flags, "--epochs", epochs)
    close("parameters, fp64", abs(parameters(folder / "c") - one).max(), FP64)


def test_an_error_on_one_rank_alone_ends_the_job(folder):
    """Not a user error: one traceback, and the other ranks end, too."""
    main = copy_with_fault("03_ddp", folder, "rank == 1", "raise RuntimeError('only here')")
    started = time.monotonic()
    code, printed = wait_for_end(start("mpiexec", [main], folder), folder)
    assert code not in (0, 2) and time.monotonic() - started < SOON
    assert printed.count("Error: only here") == printed.count("Traceback") == 1, printed


def test_failure_in_deepspeed_initialize_is_reported(folder):
    """In deepspeed.initialize() rank 0 would wait for half an hour, regardless of --timeout."""
    call = "        engine, optimizer, _, _ = deepspeed.initialize("
    fails = '        if os.environ["RANK"] == "1":\n            raise RuntimeError("bad ordinal")\n'
    copy = copy_of("04_deepspeed", folder / "copy", (call, fails + call), name="ds_config.py")
    code, printed = wait_for_end(start("mpiexec", [copy.with_name("main.py")], folder), folder)
    assert code == 2 and re.findall("^.*main.py: .*", printed, re.M) == [
        "main.py: rank 1: deepspeed.initialize(), with ds_config.json, failed: "
        "RuntimeError: bad ordinal"], printed


def test_ctrl_c_ends_the_job_without_a_traceback_of_the_ranks(folder):
    """A terminal sends it to the launcher and all ranks at once."""
    job = start("mpiexec", [ROOT / "03_ddp" / "main.py", "--epochs", 500], folder,
                start_new_session=True)
    wait(lambda: "epoch 2/" in (folder / "printed").read_text(), 300, "two epochs")
    for process in processes_of_job(folder):
        process.send_signal(signal.SIGINT)
    code, printed = wait_for_end(job, folder)
    assert code != 0 and "main.py" not in printed, printed
