"""Start ranks without a launcher: forked from a process that has already imported PyTorch.

Each rank runs a program as __main__, with the variables that torchrun sets. For tests in which the
launcher is not what is tested: they save the seconds that every rank's imports take.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

PROGRAMS = Path(__file__).with_name("programs")
AFTER_A_FAILURE = 10  # seconds in which the other ranks have to end
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([
    "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.nn",
    "torch._dynamo", "torchvision", "tqdm", "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer"])


def free_port():
    """Return a port below those that the system gives to programs which ask for any."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def rank_main(words, cwd, env, out, err):
    """Do what `python WORDS` does, its output into two files."""
    os.setsid()  # so that what it starts ends with it
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def launchers_variables(ranks):
    """Return what torchrun sets for each rank; a single one has no launcher."""
    if ranks == 1:
        return [{}]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "forked"}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def wait(processes, timeout):
    """Wait until all have ended, as a launcher would; return False for a hang."""
    running = {process.sentinel: process for process in processes}
    deadline, failed = time.monotonic() + timeout, False
    while running and time.monotonic() < deadline:
        for ended in multiprocessing.connection.wait(running, deadline - time.monotonic()):
            if running.pop(ended).exitcode and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return failed or not running


def run(words, ranks, env, timeout=300, cwd=None):
    """Run `python WORDS` on so many ranks. A hang fails the test.

    Return the worst code, and what they printed. Horovod's and TensorFlow's ranks are not forked,
    but started by mpiexec.
    """
    words, cwd = [str(word) for word in words], str(cwd or Path.cwd())
    programs = [Path(word) for word in words if word.endswith(".py")]
    text = "".join(path.read_text() for path in programs if path.parent != PROGRAMS)
    if "import horovod" in text or "import tensorflow" in text:
        mpiexec = [Path(sys.executable).parent / "mpiexec", "-n", str(ranks)] if ranks > 1 else []
        done = subprocess.run([*mpiexec, sys.executable, *words], env=env, cwd=cwd, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
        return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(env.get("PYTHONPATH") or programs[0].parent)  # the ranks inherit it
        processes = [context.Process(target=rank_main, args=(
            words, cwd, env | variables, f"{folder}/{rank}.out", f"{folder}/{rank}.err"))
            for rank, variables in enumerate(launchers_variables(ranks))]
        for process in processes:
            process.start()
        in_time = wait(processes, timeout)
        out, err = ("".join(Path(folder, f"{rank}.{name}").read_text() for rank in range(ranks))
                    for name in ("out", "err"))
    assert in_time, f"no end after {timeout} s: {err}"
    codes = [process.exitcode for process in processes]
    return SimpleNamespace(code=max(codes, key=abs), out=out, err=err)
