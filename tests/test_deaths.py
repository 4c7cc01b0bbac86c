"""One rank dies, by whatever, at whatever moment: the job ends soon, not with code 0, and nothing is left."""

import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from conftest import BIN, NO_NETWORK, PROGRAMS, ROOT, case, environment, execute
from test_mistakes import wait

CHAPTERS = "02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp", "04_deepspeed", "05_zero"
MOMENTS = "start-up", "all-reduce", "checkpoint", "barrier"
PATIENCE = 15  # seconds: the --timeout of the ranks that wait for a stopped one
SOON = 30  # seconds, with 2 busy cores: without them it is one or two
AFTER_TIMEOUT = {"mpiexec": 10, "horovodrun": 20, "torchrun": 40}  # seconds; the last two wait for a stopped worker
LAUNCHERS = {"mpiexec": ["mpiexec", "-n"], "torchrun": ["torchrun", "--nproc-per-node"],
             "horovodrun": ["horovodrun", "--gloo", "-np"], "deepspeed": ["deepspeed", "--num_gpus"]}


def start(launcher, ranks, words, folder, **options):
    """Start a program of Python on so many ranks; the folder marks its processes, and gets what they say."""
    python = [] if launcher in ("torchrun", "deepspeed") else [sys.executable]
    name, *flags = LAUNCHERS[launcher]
    env = environment() | NO_NETWORK | {"MARK": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}"}
    with open(folder / "output", "w") as output, open(folder / "errors", "w") as errors:
        return subprocess.Popen([BIN / name, *flags, str(ranks), *python, *map(str, words)], env=env,
                                stdin=subprocess.DEVNULL, stdout=output, stderr=errors, **options)


def said(folder):
    """All that was printed: apart, because lines of two ranks that print at the same time may mix."""
    return (folder / "errors").read_text() + (folder / "output").read_text()


def marked(folder):
    """The processes with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == str(folder):
                found.append(process)
        except psutil.Error:  # it has ended, or is somebody else's
            continue
    return found


def let_die(launcher, chapter, ranks, dying, moment, death, folder, *flags):
    """Start a chapter, one rank of which dies. Returns code, what was printed, seconds from death to end."""
    words = [PROGRAMS / "dying.py", dying, moment, death, ROOT / chapter / "main.py", "--global-batch-size", 64,
             "--epochs", 2, "--checkpoint", folder / "checkpoint", *flags]
    job = start(launcher, ranks, words, folder)
    try:
        wait(lambda: "dies: " in said(folder) or job.poll() is not None, 100, "a death")
        died = time.monotonic()
        code = job.wait(PATIENCE + 3 * SOON)
        seconds = time.monotonic() - died
        wait(lambda: not marked(folder), 2, "no process is left")
    finally:
        for process in marked(folder):
            process.kill()
    assert "dies: " in said(folder), said(folder)
    return SimpleNamespace(code=code, out=said(folder), seconds=seconds)


def names(launcher, rank, ranks, death, text):
    """Whether what was printed names who died, or, of a stopped rank, says why the job ends."""
    if death == "SIGSTOP":
        return re.search(r"Alarm clock|[Tt]imed out|SIGALRM", text)
    if launcher == "torchrun":
        return re.search(rf"Root Cause .*\n\[\d\]:\n.*\n.*\n  rank      : {rank} ", text)
    if launcher == "horovodrun":
        return re.search(rf"^\[{rank}\]<stderr>:Traceback|Process name: {rank}$", text, re.M)
    if death in ("exception", "memory"):
        return re.search(rf"^rank {rank} of {ranks}:\nTraceback", text, re.M)
    return re.search(r"PID \d+ RUNNING AT .*\n=   EXIT CODE: (9|15)\n", text)


def deaths_of(place, chapter):
    """Cases for a chapter: at each moment SIGSTOP and one of the others, so that over all each meets each moment.

    A rank that is stopped before the ranks have met is waited for: MPI has no limit.
    """
    for number, moment in enumerate(MOMENTS):
        others = "SIGKILL", "SIGTERM", "exception", "memory"
        for turn, death in enumerate(("SIGSTOP", others[(place + number) % 4])):
            if (moment, death) == ("start-up", "SIGSTOP"):
                continue
            second = "horovodrun" if "horovod" in chapter else "torchrun"
            launcher = ("mpiexec", second)[(place + number + turn) % 2]
            ranks = 4 if (place + number + turn) % 3 == 0 else 2
            dying = 0 if moment == "checkpoint" else ranks - 1  # rank 0 writes
            yield case(chapter, launcher, ranks, dying, moment, death, marks=[pytest.mark.fault],
                       id=f"{chapter} {launcher} {ranks} {moment} {death}")


@pytest.mark.fault
@pytest.mark.parametrize(("chapter", "launcher"), [case("02_horovod/pytorch", "mpiexec"), case("03_ddp", "mpiexec"),
                                                   case("03_ddp", "torchrun"), case("04_deepspeed", "mpiexec")])
def test_ctrl_c_ends_the_job_without_a_traceback_of_the_ranks(chapter, launcher, tmp_path):
    """A terminal sends it to the launcher and all ranks at once."""
    job = start(launcher, 2, [ROOT / chapter / "main.py", "--epochs", 500], tmp_path, start_new_session=True)
    try:
        wait(lambda: "epoch 2/" in said(tmp_path) or job.poll() is not None, 100, "two epochs")
        for process in marked(tmp_path):
            process.send_signal(signal.SIGINT)
        assert job.wait(SOON) != 0
        wait(lambda: not marked(tmp_path), 2, "no process is left")
    finally:
        for process in marked(tmp_path):
            process.kill()
    assert "main.py" not in said(tmp_path).replace("main.py FAILED", ""), said(tmp_path)


@pytest.mark.parametrize(("env", "handler"), [({"PMI_RANK": "0", "PMI_SIZE": "2"}, "SIG_DFL"),
                                              ({}, "default_int_handler")])
def test_a_rank_has_no_handler_that_a_second_ctrl_c_could_interrupt(env, handler):
    """Launchers pass it on, so that a rank gets it twice."""
    program = "import signal; from ranks import run; run(lambda: print(repr(signal.getsignal(signal.SIGINT))))"
    done = execute([sys.executable, "-c", program], cwd=ROOT / "03_ddp", env=env)
    assert done.code == 0 and handler in done.out, done


@pytest.mark.parametrize(("chapter", "launcher", "ranks", "dying", "moment", "death"), [
    one for place, chapter in enumerate(CHAPTERS) for one in deaths_of(place, chapter)])
def test_a_death_ends_the_job_and_is_told(chapter, launcher, ranks, dying, moment, death, tmp_path):
    done = let_die(launcher, chapter, ranks, dying, moment, death, tmp_path, "--timeout", PATIENCE)
    assert done.code not in (0, 2), done.out
    assert done.seconds < (PATIENCE + AFTER_TIMEOUT[launcher] if death == "SIGSTOP" else SOON), done.out
    assert names(launcher, dying, ranks, death, done.out), done.out
