"""Start ranks without a launcher: forked from a process that has already imported PyTorch.

Each rank runs a program as __main__, with the variables that torchrun sets. This saves the seconds
that every rank's imports take, in tests that do not test the launcher.
"""

import contextlib
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import time
import warnings
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

GRACE_PERIOD = 10  # seconds in which the other ranks must end after a failure
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([
    "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.nn",
    "torch._dynamo", "torchvision", "sklearn.datasets", "tqdm", "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer"])


def free_port():
    """Return a free port below the range that the system uses for outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def rank_main(arguments, cwd, env, out, err):
    """Run `python ARGUMENTS` with stdout and stderr redirected to two files."""
    os.setsid()  # so that killing the group ends its children, too
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for descriptor, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    torch.seed()  # forked ranks inherit the same RNG state
    for category in DeprecationWarning, FutureWarning:  # nothing that PyTorch will remove
        warnings.filterwarnings("error", category=category, module="__main__|workshop")
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def torchrun_variables(ranks):
    """Return the variables that torchrun sets for each rank."""
    variables = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "forked"}
    return [variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def horovodrun_variables(ranks):
    """Start a rendezvous server. Return it, and for each rank what horovodrun --gloo sets."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    variables = create_run_env_vars("127.0.0.1", ["lo"], str(server.start()))
    slots = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
    server.init(slots)
    return server, [variables | create_slot_env_vars(slot) for slot in slots]


def wait_for_ranks(processes, timeout):
    """Wait for all processes to end, as a launcher would; return False for a hang."""
    by_sentinel = {process.sentinel: process for process in processes}
    deadline, has_failed = time.monotonic() + timeout, False
    while by_sentinel and time.monotonic() < deadline:
        for sentinel in connection.wait(by_sentinel, deadline - time.monotonic()):
            if by_sentinel.pop(sentinel).exitcode and not has_failed:
                has_failed = True
                deadline = min(deadline, time.monotonic() + GRACE_PERIOD)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return has_failed or not by_sentinel


def run(arguments, ranks, env, timeout=300, cwd=None, variables=None):
    """Run `python ARGUMENTS` on `ranks` ranks. Return the worst exit code and the output.

    variables: of each rank, or else a launcher's; a single rank has none. A hang fails the test.
    """
    arguments, cwd = [str(argument) for argument in arguments], str(cwd or Path.cwd())
    programs = [Path(argument) for argument in arguments if argument.endswith(".py")]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.syspath_prepend(env.get("PYTHONPATH") or programs[0].parent)  # the ranks inherit it
        if variables is None and ranks > 1 and "import horovod" in programs[-1].read_text():
            server, variables = horovodrun_variables(ranks)
            stack.callback(server.stop)
        variables = variables or (torchrun_variables(ranks) if ranks > 1 else [{}])
        processes = []
        for rank in range(ranks):
            rank_arguments = (arguments, cwd, env | variables[rank],
                              f"{folder}/{rank}.out", f"{folder}/{rank}.err")
            processes.append(context.Process(target=rank_main, args=rank_arguments))
            processes[-1].start()
        in_time = wait_for_ranks(processes, timeout)
        out = "".join(Path(folder, f"{rank}.out").read_text() for rank in range(ranks))
        err = "".join(Path(folder, f"{rank}.err").read_text() for rank in range(ranks))
    assert in_time, f"timed out after {timeout} s: {err}"
    codes = [process.exitcode for process in processes]
    return SimpleNamespace(code=max(codes, key=abs), out=out, err=err)
