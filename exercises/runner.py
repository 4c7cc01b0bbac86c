"""Run a learner's functions on ranks that are forked, so that torch is imported once."""

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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
import torch.distributed as dist

STILL = 4  # s in which no rank computes: they wait for each other
LIMIT = 20  # s of processor time of all ranks together; solutions need one or two
SHOWN = 20  # lines of a rank's output, the last ones
MESSAGES = ("send", "recv", "isend", "irecv")
COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "barrier")

Points = Iterator[tuple[str, bool, str]]  # what is asked, whether it is right, the hint if not


class NotRun(Exception):
    """The learner's file did not run to its end: the text says where and why."""


def on_ranks(file: Path, function: Callable[[int], object], ranks: int, meet: bool = True) -> list:
    """Return the values of function(rank) in processes that have a process group over gloo.

    Without `meet` the learner's file makes the group. Prints what the ranks print. Raises NotRun,
    with the learner's own line, if one of them raises or ends, or is not done in time.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        processes = [fork.Process(target=be_rank, args=(rank, ranks, folder, file, function, meet))
                     for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            wait(processes, folder, file)
        finally:
            for process in processes:  # all at once: a rank would complain about one that is gone
                process.kill()
            for process in processes:
                process.join()
            for rank in range(ranks):
                for line in text_of(folder / f"{rank}.out").splitlines()[-SHOWN:]:
                    print(f"  rank {rank} prints: {line}")
        return [pickle.loads((folder / f"{rank}.value").read_bytes()) for rank in range(ranks)]


def be_rank(rank, ranks, folder, file, function, meet):
    """Be a forked process, which leaves a value, or a problem and when that came up."""
    out = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout.reconfigure(line_buffering=True)
    disk = folder / f"{rank}.disk"  # a folder of its own, for what the learner's file writes
    disk.mkdir()
    os.chdir(disk)
    faulthandler.register(signal.SIGUSR1, open(folder / f"{rank}.place", "w"))
    try:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        warnings.simplefilter("ignore")  # PyTorch's, of new names for collectives and the like
        if meet:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
            dist.barrier()  # all are connected before one may end
        leave(folder / f"{rank}.value", function(rank))
        time.sleep(600)  # others may need its connections: on_ranks ends all together
    except BaseException as problem:
        leave(folder / f"{rank}.problem", (time.monotonic(), in_words(problem, file, rank)))
    finally:
        os._exit(1)


def leave(path, value):
    """Write a file that is there with all its content, or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


def in_words(problem, file, rank):
    """Return an exception and the learner's line in one line of text."""
    lines = [line for frame, line in traceback.walk_tb(problem.__traceback__)
             if frame.f_code.co_filename == str(file)]
    if lines and isinstance(problem, NotImplementedError):
        return f"line {lines[-1]} of {file.name} waits for your lines"
    where = f"{file.name}, line {lines[-1]}" if lines else file.name
    text = f"{where}, on rank {rank}: {type(problem).__name__}: {problem}"
    return " ".join(text.split())


def wait(processes, folder, file):
    """Return once all ranks have left a value. Raise NotRun if one ends, or all stand still."""
    deadline, spent, since = math.inf, 0, time.monotonic()
    values = [folder / f"{rank}.value" for rank in range(len(processes))]
    while spent < LIMIT and time.monotonic() < min(deadline, since + STILL):
        time.sleep(0.01)
        if all(value.exists() for value in values):
            return
        if not all(process.is_alive() for process in processes):
            # Another rank may have a problem that came up before.
            deadline = min(deadline, time.monotonic() + 1)
        with contextlib.suppress(psutil.Error):  # one that ends just now
            total = sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in processes)
            if total - spent > 0.05:
                spent, since = total, time.monotonic()

    problems = [pickle.loads(path.read_bytes()) for path in folder.glob("*.problem")]
    for rank, process in enumerate(processes):
        if not process.is_alive() and not (folder / f"{rank}.problem").exists():
            raise NotRun(
                f"rank {rank} ended before its function returned. (Of its own accord, or by gloo, "
                "which ends a rank that receives a message larger than its room)")
    if problems:
        raise NotRun(min(problems)[1])  # what came first is the cause of the others
    for process in processes:
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.2)
    places = [place(folder, file, rank) for rank in range(len(processes))]
    raise NotRun(
        "not at its end in time: slow, a loop, or ranks that wait for each other (a send ends "
        "when the other rank receives, a collective when all call it): " + ", ".join(places))


def place(folder, file, rank):
    """Return where a rank stands, in words."""
    if (folder / f"{rank}.value").exists():
        return f"rank {rank} is done"
    stack = text_of(folder / f"{rank}.place")
    lines = re.findall(rf'File "{re.escape(str(file))}", line (\d+)', stack)
    return f"rank {rank} at line {lines[0]}" if lines else f"rank {rank} outside of {file.name}"


def text_of(path):
    return path.read_text(errors="replace") if path.exists() else ""


def counted() -> list:
    """Return a list that grows by (operation, elements, peer or None) with each communication.

    Call it before the learner's file is loaded, which may import the functions by name.
    """
    calls, within, requests = [], [], []

    def watch(name, original):
        def call(*args, **kwargs):
            if within:  # dist.send calls dist.isend
                return original(*args, **kwargs)
            peer = args[1] if args[1:] else kwargs.get("dst", kwargs.get("src"))
            if name in MESSAGES and peer not in range(dist.get_world_size()):
                raise ValueError(f"{name}: there is no rank {peer}")  # gloo would hang
            tensors = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value)]
            calls.append((name, tensors[-1].numel() if tensors else 0, peer))
            within.append(name)
            try:
                # A request that nobody keeps would not be carried out, and the other rank hang.
                requests.append(original(*args, **kwargs))
                return requests[-1]
            finally:
                within.pop()
        return call

    for name in (*MESSAGES, *COLLECTIVES):
        call = watch(name, getattr(dist, name))
        for module in (dist, dist.distributed_c10d):  # there batch_isend_irecv looks for it
            setattr(module, name, call)
    return calls


def learner(file: Path) -> SimpleNamespace:
    """Return what the learner's file defines."""
    return SimpleNamespace(**runpy.run_path(str(file)))


# What several checks compare.

def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a copy of the numbers of all tensors, end to end."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def same(value: object, expected: torch.Tensor) -> bool:
    """Return True if the value is a tensor like the expected one but for rounding, in fp64."""
    if not torch.is_tensor(value):
        return False
    if (value.shape, value.dtype) != (expected.shape, expected.dtype):
        return False
    return torch.allclose(value, expected, rtol=1e-8, atol=1e-10)
