"""Run a learner's functions on forked ranks, so that torch is imported only once."""

import contextlib
import faulthandler
import math
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
import torch.distributed as dist

IDLE_SECONDS = 4  # ranks that compute nothing for so long wait for each other
MAX_CPU_SECONDS = 20  # of all ranks together; solutions need one or two
MAX_OUTPUT_LINES = 20  # per rank, the last ones
POINT_TO_POINT = ("send", "recv", "isend", "irecv")
COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all", "barrier")  # older PyTorch lacks the _single ones


class NotRun(Exception):
    """The learner's file did not run to completion; the text says where and why."""


def on_ranks(file: Path, function: Callable[[int], object], ranks: int,
             backend: str | None = "gloo") -> list:
    """Return [function(rank) for each rank], run in processes with a process group.

    If `backend` is None, the learner's file creates the group. Prints the ranks' output. Raises
    NotRun, naming the learner's line, if a rank raises an exception, exits or times out.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        processes = []
        for rank in range(ranks):
            (folder / f"{rank}.out").touch()
            processes.append(fork.Process(
                target=run_rank, args=(rank, ranks, folder, file, function, backend)))
            processes[-1].start()
        try:
            wait_for_values(processes, folder, file)
        finally:
            for process in processes:  # kill all before join: a rank would report a lost peer
                process.kill()
            for rank, process in enumerate(processes):
                process.join()
                output = (folder / f"{rank}.out").read_text(errors="replace")
                for line in output.splitlines()[-MAX_OUTPUT_LINES:]:
                    print(f"  rank {rank} prints: {line}")
        return [pickle.loads((folder / f"{rank}.value").read_bytes()) for rank in range(ranks)]


def run_rank(rank, ranks, folder, file, function, backend):
    """Run `function` in a forked process. Write its value, or a description of its exception."""
    output = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)
    working_folder = folder / str(rank)  # for files that the exercise writes
    working_folder.mkdir()
    os.chdir(working_folder)
    faulthandler.register(signal.SIGUSR1, open(folder / f"{rank}.stack", "w"))
    try:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        warnings.simplefilter("ignore")  # deprecation warnings of PyTorch
        if backend:
            dist.init_process_group(
                backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
            dist.barrier()  # so that no rank exits before all are connected
        write_atomically(folder / f"{rank}.value", function(rank))
        time.sleep(600)  # keep the connections open: on_ranks kills all ranks together
    except BaseException as problem:
        description = describe_exception(problem, file, rank)
        write_atomically(folder / f"{rank}.problem", (time.monotonic(), description))
    finally:
        os._exit(1)


def write_atomically(path, value):
    """Write a file completely or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


def describe_exception(problem, file, rank):
    """Return one line with an exception and the learner's line that raised it."""
    lines = [line for frame, line in traceback.walk_tb(problem.__traceback__)
             if frame.f_code.co_filename == str(file)]
    if lines and isinstance(problem, NotImplementedError):
        return (f"{file.name}, line {lines[-1]}: NotImplementedError: replace this line with "
                "your code")
    where = f"{file.name}, line {lines[-1]}" if lines else file.name
    text = f"{where}, on rank {rank}: {type(problem).__name__}: {problem}"
    return " ".join(text.split())


def wait_for_values(processes, folder, file):
    """Return once all ranks have written a value. Raise NotRun if one exits or all hang."""
    deadline, cpu_seconds, last_progress = math.inf, 0, time.monotonic()
    values = [folder / f"{rank}.value" for rank in range(len(processes))]
    while cpu_seconds < MAX_CPU_SECONDS:
        if time.monotonic() > min(deadline, last_progress + IDLE_SECONDS):
            break
        time.sleep(0.01)
        if all(value.exists() for value in values):
            return
        if not all(process.is_alive() for process in processes):
            # Another rank may have failed earlier: give it time to write its exception.
            deadline = min(deadline, time.monotonic() + 1)
        with contextlib.suppress(psutil.Error):  # a process that has just exited
            times = [psutil.Process(process.pid).cpu_times() for process in processes]
            total = sum(seconds.user + seconds.system for seconds in times)
            if total - cpu_seconds > 0.05:
                cpu_seconds, last_progress = total, time.monotonic()

    problems = [pickle.loads(path.read_bytes()) for path in folder.glob("*.problem")]
    for rank, process in enumerate(processes):
        if not process.is_alive() and not (folder / f"{rank}.problem").exists():
            raise NotRun(
                f"rank {rank} exited before its function returned: it called exit(); or gloo "
                "aborted it, because the ranks made different calls (such as a collective in "
                "`if rank == 0:`), or a message was larger than the tensor that receives it")
    if problems:
        _, first = min(problems)  # it caused the others
        raise NotRun(first)
    for process in processes:
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.2)
    positions = [describe_position(folder, file, rank) for rank in range(len(processes))]
    raise NotRun(
        "timed out: too slow, an infinite loop, or a deadlock (ranks waiting for each other). A "
        "send returns only when the other rank receives, a collective only when every rank calls "
        "it. Now " + ", ".join(positions))


def describe_position(folder, file, rank):
    """Return a text that says at which line of the file a rank is."""
    if (folder / f"{rank}.value").exists():
        return f"rank {rank} has finished"
    stack = (folder / f"{rank}.stack").read_text()
    lines = re.findall(rf'File "{re.escape(str(file))}", line (\d+)', stack)
    return f"rank {rank} is " + (f"at line {lines[0]}" if lines else f"not in {file.name}")


def record_calls() -> list:
    """Return a list to which each call of dist appends (operation, elements, peer or None).

    Call it before load_exercise(), because the file may import the functions by name.
    """
    calls, requests, is_active = [], [], False

    def make_recorder(name, original):
        def call_and_record(*args, **kwargs):
            nonlocal is_active
            if is_active:  # dist.send calls dist.isend: record only the outer call
                return original(*args, **kwargs)
            peer = args[1] if args[1:] else kwargs.get("dst", kwargs.get("src"))
            if name in POINT_TO_POINT and peer not in range(dist.get_world_size()):
                raise ValueError(f"{name}: rank {peer} does not exist")  # gloo would hang
            tensors = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value)]
            calls.append((name, tensors[-1].numel() if tensors else 0, peer))
            is_active = True
            try:
                # If a request is garbage-collected, gloo drops it and the peer hangs.
                requests.append(original(*args, **kwargs))
                return requests[-1]
            finally:
                is_active = False
        return call_and_record

    for name in filter(vars(dist).get, (*POINT_TO_POINT, *COLLECTIVES)):
        recorder = make_recorder(name, getattr(dist, name))
        for module in (dist, dist.distributed_c10d):  # batch_isend_irecv uses the second
            setattr(module, name, recorder)
    return calls


def load_exercise(file: Path) -> SimpleNamespace:
    """Run the learner's file; return its global names as attributes."""
    return SimpleNamespace(**runpy.run_path(str(file)))


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return one vector with the elements of all tensors."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def flatten_gradients(model: torch.nn.Module) -> torch.Tensor:
    """Return all gradients as one vector, with zeros for a parameter that has none."""
    return flatten(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                   for parameter in model.parameters())


def is_close(value: object, expected: torch.Tensor) -> bool:
    """Return True if value is a tensor equal to `expected`, an fp64 tensor, up to rounding."""
    if not torch.is_tensor(value):
        return False
    if (value.shape, value.dtype) != (expected.shape, expected.dtype):
        return False
    return torch.allclose(value, expected, rtol=1e-8, atol=1e-10)
