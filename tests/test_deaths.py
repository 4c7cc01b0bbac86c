"""If one rank is killed, stopped or fails, the job soon ends with an error that says why.

No process of the job survives.
"""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import BIN, NO_NETWORK, ROOT, case, copy_and_edit, environment, wait_until

pytestmark = pytest.mark.fault

RANK_TIMEOUT = 20  # --timeout in seconds, of ranks that wait for a stopped one
JOB_TIMEOUT = 150  # seconds in which a job must end
LAUNCHERS = {"mpiexec": ["mpiexec", "-n", 2, sys.executable],
             "torchrun": ["torchrun", "--nproc-per-node", 2]}
FAILURE_MESSAGES = {  # of the launchers, about rank 1
    "mpiexec": r"PID \d+ RUNNING AT .*\n=   EXIT CODE: 9\n",
    "torchrun": r"Root Cause .*\n\[\d\]:\n.*\n.*\n  rank      : 1 "}
TIMEOUT_MESSAGE = r"[Tt]imed out|Timeout \("
slow = pytest.mark.slow


def start(launcher, arguments, folder, **options):
    """Start `python ARGUMENTS` on two ranks; the folder marks the processes and gets the output."""
    name, *flags = LAUNCHERS[launcher]
    env = environment() | NO_NETWORK | {
        "MARK": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}"}
    command = [str(word) for word in (BIN / name, *flags, *arguments)]
    with open(folder / "output", "a") as output:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output,
                                stderr=subprocess.STDOUT, **options)


def processes_of_job(folder):
    """Return the processes that start() marked with this folder."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == str(folder):
                processes.append(process)
        except psutil.Error:  # the process has ended, or belongs to another user
            continue
    return processes


def wait_for_end(job, folder, seconds=JOB_TIMEOUT):
    """Wait for the job and all its processes to end. Return its exit code and output."""
    code = job.wait(seconds)
    wait_until(lambda: not processes_of_job(folder), 20, "the end of all processes")
    return code, (folder / "output").read_text()


@pytest.fixture
def folder(tmp_path):
    """Return a folder for start(); kill the processes that a failed test leaves."""
    yield tmp_path
    for process in processes_of_job(tmp_path):
        process.kill()


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
def test_a_killed_or_stopped_rank_ends_the_job(chapter, launcher, signal_name, rank, folder):
    """A rank gets the signal in its fourth step; the other waits for it in the all-reduce."""
    is_stopped = signal_name == "SIGSTOP"
    main = copy_with_fault(chapter, folder, f"rank == {rank} and step == 3",
                           f"os.kill(os.getpid(), {signal.Signals[signal_name]:d})")
    flags = ["--timeout", RANK_TIMEOUT] if is_stopped else []
    job = start(launcher, [main, *flags], folder)
    code, output = wait_for_end(job, folder, 300)
    assert code not in (0, 2) and "ranks: 2," in output
    expected = TIMEOUT_MESSAGE if is_stopped else FAILURE_MESSAGES[launcher]
    assert re.search(expected, output), output


def test_an_error_on_one_rank_alone_ends_the_job(folder):
    """An error that is not the user's gives one traceback, and the other ranks end, too."""
    main = copy_with_fault("03_ddp", folder, "rank == 1", "raise RuntimeError('only here')")
    code, output = wait_for_end(start("mpiexec", [main], folder), folder)
    assert code not in (0, 2)
    assert output.count("Error: only here") == output.count("Traceback") == 1, output


def test_failure_in_deepspeed_initialize_is_reported(folder):
    """In deepspeed.initialize() rank 0 would wait for half an hour, regardless of --timeout."""
    call = "        engine, optimizer, _, _ = deepspeed.initialize("
    fault = '        if os.environ["RANK"] == "1":\n            raise RuntimeError("bad ordinal")\n'
    ds_config = copy_and_edit("04_deepspeed", folder / "copy", (call, fault + call),
                              name="workshop/ds_config.py")
    job = start("mpiexec", [ds_config.parent.with_name("main.py")], folder)
    code, output = wait_for_end(job, folder)
    assert code == 2 and re.findall("^.*main.py: .*", output, re.M) == [
        "main.py: rank 1: deepspeed.initialize(), with ds_config.json, failed: "
        "RuntimeError: bad ordinal"], output


def test_a_failing_rank_tells_mpiexec():
    """MPICH's mpiexec can miss that a rank has exited, so ending.run() asks it to end the job."""
    program = "import sys; from workshop.ending import run; run(lambda: sys.exit('a mistake'))"
    reader, writer = os.pipe()
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": str(writer), "MPI_LOCALRANKID": "0"}
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "03_ddp", pass_fds=[writer],
                            env=os.environ | variables, timeout=60)
    os.close(writer)
    assert result.returncode == 2 and os.read(reader, 99) == b"cmd=abort exitcode=2\n"


def test_ctrl_c_ends_the_job_without_a_traceback(folder):
    """A terminal sends Ctrl-C to the launcher and all ranks at once."""
    job = start("mpiexec", [ROOT / "03_ddp" / "main.py", "--epochs", 500], folder,
                start_new_session=True)
    wait_until(lambda: "epoch 2/" in (folder / "output").read_text(), 300, "two epochs")
    for process in processes_of_job(folder):
        process.send_signal(signal.SIGINT)
    code, output = wait_for_end(job, folder)
    assert code != 0 and "main.py" not in output, output
