"""If one rank is killed, stopped or fails, the job soon ends with an error that says why.

No process of the job survives: run_command() returns only when all have closed their output.
"""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import BIN, ROOT, case, copy_and_edit, run, run_command

from cluster.launch import rank_command

pytestmark = pytest.mark.fault

JOB_TIMEOUT = 150  # seconds in which a job must end
FAILURE_MESSAGES = {  # of the launchers, about rank 1
    "mpiexec": r"PID \d+ RUNNING AT .*\n=   EXIT CODE: 9\n",
    "torchrun": r"Root Cause .*\n\[\d\]:\n.*\n.*\n  rank      : 1 "}
slow = pytest.mark.slow


def copy_with_fault(chapter, folder, condition, statement):
    """Copy a chapter, in which a rank runs a statement before the backward pass. Return main.py."""
    backward = "            loss.backward()"
    return copy_and_edit(chapter, folder / "copy", (backward, f"""\
            if {condition}:
                {statement}
{backward}"""))


@pytest.mark.parametrize(("chapter", "launcher", "signal_name", "rank"), [
    case("03_ddp", "mpiexec", "SIGKILL", 1, marks=[slow, pytest.mark.core]),
    case("03_ddp", "mpiexec", "SIGSTOP", 1, marks=[slow]),
    case("03_ddp", "mpiexec", "SIGSTOP", 0),  # its store answers nobody any more
    case("02_horovod", "mpiexec", "SIGSTOP", 1, marks=[slow]),
    case("03_ddp", "torchrun", "SIGKILL", 1, marks=[pytest.mark.core])])
def test_a_killed_or_stopped_rank_ends_the_job(chapter, launcher, signal_name, rank, tmp_path):
    """A rank gets the signal in its fourth step; the other waits for it in the all-reduce."""
    is_stopped = signal_name == "SIGSTOP"
    main = copy_with_fault(chapter, tmp_path, f"rank == {rank} and step == 3",
                           f"os.kill(os.getpid(), {signal.Signals[signal_name]:d})")
    command = rank_command(main, 2, "--timeout", 15 if is_stopped else 1800)
    if launcher == "torchrun":
        command = [BIN / "torchrun", "--nproc-per-node", 2, main]
    result = run_command(command, 2 * JOB_TIMEOUT)
    output = result.out + result.err
    assert result.code not in (0, 2) and "ranks: 2," in output, output
    expected = r"[Tt]imed out|Timeout \(" if is_stopped else FAILURE_MESSAGES[launcher]
    assert re.search(expected, output), output


def test_a_rank_that_is_out_of_memory_ends_the_job(tmp_path):
    """An error that is not the user's gives one traceback, and the other ranks end, too."""
    main = copy_with_fault("03_ddp", tmp_path, "rank == 1", "raise torch.OutOfMemoryError('here')")
    result = run(main, 2, launcher=True, timeout=JOB_TIMEOUT)
    assert result.code not in (0, 2)
    assert result.err.count("OutOfMemoryError: here") == result.err.count("Traceback") == 1, result


def test_failure_in_deepspeed_initialize_is_reported(tmp_path):
    """In deepspeed.initialize() rank 0 would wait for half an hour, regardless of --timeout."""
    call = "        engine, optimizer, _, _ = deepspeed.initialize("
    fault = '        if os.environ["RANK"] == "1":\n            raise RuntimeError("bad ordinal")\n'
    ds_config = copy_and_edit("04_deepspeed", tmp_path / "copy", (call, fault + call),
                              name="workshop/ds_config.py")
    result = run(ds_config.parent.with_name("main.py"), 2, timeout=JOB_TIMEOUT)
    assert result.code and re.findall("^.*main.py: .*", result.err, re.M) == [
        "main.py: rank 1: deepspeed.initialize(), with ds_config.json, failed: "
        "RuntimeError: bad ordinal"], result


def run_main(statement, **options):
    """Start ending.run() of a main() with one statement, in a process of its own."""
    program = f"import signal, sys; from workshop.ending import run; run(lambda: {statement})"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT / "03_ddp", timeout=60,
                          capture_output=True, text=True, **options)


def test_a_failing_rank_tells_mpiexec():
    """MPICH's mpiexec can miss that a rank has exited, so ending.run() asks it to end the job."""
    reader, writer = os.pipe()
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": str(writer), "MPI_LOCALRANKID": "0"}
    result = run_main("sys.exit('a mistake')", env=os.environ | variables, pass_fds=[writer])
    os.close(writer)
    assert result.returncode == 2 and os.read(reader, 99) == b"cmd=abort exitcode=2\n"


def test_ctrl_c_ends_a_rank_without_a_traceback():
    result = run_main("signal.raise_signal(signal.SIGINT)")
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")
