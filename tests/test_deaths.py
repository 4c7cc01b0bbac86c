"""One rank dies, by whatever, at whatever moment: the job ends soon, says which rank it was, and nothing is left."""

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from conftest import BIN, NO_NETWORK, PROGRAMS, ROOT, case, environment
from faults import fault
from test_mistakes import wait

CHAPTERS = "02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp", "04_deepspeed", "05_zero"
MOMENTS = "start-up", "all-reduce", "checkpoint", "barrier"
SOON = 30  # seconds, with 2 busy cores: without them it is one or two
LAUNCHERS = {"mpiexec": ["mpiexec", "-n"], "torchrun": ["torchrun", "--nproc-per-node"],
             "horovodrun": ["horovodrun", "--gloo", "-np"], "deepspeed": ["deepspeed", "--num_gpus"]}


def patience(chapter):
    """The --timeout of the ranks that wait for a stopped one, in seconds. TensorFlow compiles for some."""
    return 25 if "tensorflow" in chapter else 12


def start(launcher, ranks, words, folder):
    """Start a program of Python on so many ranks; the folder marks its processes, and gets what they say."""
    python = [] if launcher in ("torchrun", "deepspeed") else [sys.executable]
    name, *flags = LAUNCHERS[launcher]
    env = environment() | NO_NETWORK | {"MARK": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}"}
    with open(folder / "said", "w") as said:
        return subprocess.Popen([BIN / name, *flags, str(ranks), *python, *map(str, words)], env=env,
                                stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)


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
    said = folder / "said"
    try:
        wait(lambda: "dies: " in said.read_text() or job.poll() is not None, 100, "a death")
        died = time.monotonic()
        code = job.wait(patience(chapter) + 2 * SOON)
        seconds = time.monotonic() - died
        wait(lambda: not marked(folder), 2, "no process is left")
    finally:
        for process in marked(folder):
            process.kill()
    assert "dies: " in said.read_text(), said.read_text()
    return SimpleNamespace(code=code, out=said.read_text(), seconds=seconds)


def names(launcher, rank, ranks, death, said):
    """Whether what was printed names who died. MPICH's mpiexec names a process, the first or another."""
    if death == "SIGSTOP":
        return re.search(rf"main\.py: rank \d stands still for \d+ s .*: rank {rank}, process \d+, is stopped",
                         said)
    if launcher == "torchrun":
        return re.search(rf"Root Cause .*\n\[\d\]:\n.*\n.*\n  rank      : {rank} ", said)
    if launcher == "horovodrun":
        return re.search(rf"^\[{rank}\]<stderr>:Traceback|Process name: {rank}$", said, re.M)
    if death in ("exception", "memory"):
        return re.search(rf"^rank {rank} of {ranks} ends all:\nTraceback", said, re.M)
    return re.search(r"PID \d+ RUNNING AT .*\n=   EXIT CODE: (9|15)\n", said)


def deaths_of(place, chapter):
    """Cases for a chapter: at each moment SIGSTOP and one of the others, so that over all each meets each moment."""
    for number, moment in enumerate(MOMENTS):
        others = "SIGKILL", "SIGTERM", "exception", "memory"
        for turn, death in enumerate(("SIGSTOP", others[(place + number) % 4])):
            second = "horovodrun" if "horovod" in chapter else "torchrun"
            launcher = ("mpiexec", second)[(place + number + turn) % 2]
            ranks = 4 if (place + number + turn) % 3 == 0 else 2
            dying = 0 if moment == "checkpoint" else ranks - 1  # rank 0 writes
            row = {"exception": "an exception", "memory": "no memory left"}.get(death, death)
            yield case(chapter, launcher, ranks, dying, moment, death, marks=[fault("ranks die", row)],
                       id=f"{chapter} {launcher} {ranks} {moment} {death}")


@pytest.mark.parametrize(("chapter", "launcher", "ranks", "dying", "moment", "death"), [
    one for place, chapter in enumerate(CHAPTERS) for one in deaths_of(place, chapter)])
def test_a_death_ends_the_job_and_is_named(chapter, launcher, ranks, dying, moment, death, tmp_path):
    done = let_die(launcher, chapter, ranks, dying, moment, death, tmp_path, "--timeout", patience(chapter))
    assert done.code not in (0, 2), done.out
    assert done.seconds < SOON + (patience(chapter) if death == "SIGSTOP" else 0), done.out
    assert names(launcher, dying, ranks, death, done.out), done.out
