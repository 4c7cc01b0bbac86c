"""Ranks without a launcher: forked from a process that has imported the frameworks, so that a run costs what it does.

Each rank runs a chapter's file as __main__, with the variables that torchrun sets. For tests in which the launcher is
not what is tested; Horovod's ranks need theirs.
"""

import contextlib
import multiprocessing
import os
import random
import runpy
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload([  # what the chapters import, and what that imports at the first step
    "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch._dynamo", "tqdm", "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer"])


def free_port():
    """A port that no system gives to a program which asks for any, so that tests beside this one do not take it."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("", random.randrange(20000, 32000))) as server:
            return server.getsockname()[1]


def rank_main(words, env, printed):
    """What a rank does: the words of a python command, its output into two files."""
    os.environ.update(env)
    for number, path in zip((1, 2), printed):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))  # as python does
    runpy.run_path(words[0], run_name="__main__")


def run(words, ranks, env, timeout=300):
    """Run `python WORDS` on so many ranks. Returns the worst code, and what they printed; a hang is an error."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1",
                         "MASTER_PORT": port}
            place = {name: str(value) for name, value in variables.items()}
            printed = [f"{folder}/{rank}.out", f"{folder}/{rank}.err"]
            processes.append(FORK.Process(target=rank_main, args=([str(word) for word in words], env | place, printed)))
            processes[-1].start()
        deadline = time.monotonic() + timeout
        try:
            while any(process.is_alive() for process in processes):
                if any(process.exitcode for process in processes):  # one has failed: as a launcher, end the others
                    deadline = min(deadline, time.monotonic() + 10)
                if time.monotonic() > deadline:
                    break
                processes[0].join(0.02)
        finally:
            for process in processes:
                process.kill()
                process.join()
        read = [[Path(folder, f"{rank}.{name}").read_text() for rank in range(ranks)] for name in ("out", "err")]
        codes = [process.exitcode for process in processes]
    out, err = map("".join, read)
    assert time.monotonic() < deadline or any(code > 0 for code in codes), f"no end after {timeout} s: {err}"
    return SimpleNamespace(code=max(codes, key=abs), out=out, err=err)
