"""Run a learner's functions on ranks that are forked from this process, so that torch is imported once."""

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
import torch.distributed as dist
from grade import load

STARTED = time.monotonic()
LIMIT = 13  # s since then, until ranks are ended: the answer is there within 15
STILL = 4  # s without computing
PRINTED = []  # the ranks' output, in the learner's own words
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter",
               "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "send", "recv",
               "isend", "irecv")


class NotRun(Exception):
    """The learner's file did not run to its end: the text says where and why."""


def show_printed():
    """What the learner's file has printed, and of which rank."""
    for rank, text in PRINTED:
        for line in text.splitlines()[-20:]:
            print(f"  rank {rank} prints: {line}")


def on_ranks(file, function, ranks, meet=True):
    """The values of function(rank), called in `ranks` processes that have a process group over gloo.

    Without `meet` the learner's file makes it. Raises NotRun, with the learner's own line, if one of them raises or
    ends, or is not done in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        children = []
        for rank in range(ranks):
            sys.stdout.flush()
            child = os.fork()
            if not child:
                be_rank(folder, function, rank, ranks, meet)
            children.append(child)
        codes = wait(children, folder)
        PRINTED[:] = [(rank, (folder / f"{rank}.out").read_text()) for rank in range(ranks)]
        complain(file, codes, folder)
        return [pickle.loads((folder / f"{rank}.value").read_bytes()) for rank in range(ranks)]


def be_rank(folder, function, rank, ranks, meet):
    """The life of a forked process."""
    out = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    with open(folder / f"{rank}.place", "w") as place:
        faulthandler.register(signal.SIGUSR1, place)
        code = 1
        try:
            torch.set_num_threads(1)
            torch.manual_seed(rank)
            if meet:
                dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
            value = function(rank)
            (folder / f"{rank}.part").write_bytes(pickle.dumps(value))
            (folder / f"{rank}.part").rename(folder / f"{rank}.value")
            code = 0
        except BaseException as problem:
            text = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
            lines = [f"{frame.filename}\n{frame.lineno}" for frame in frames(problem.__traceback__)]
            (folder / f"{rank}.problem").write_text("\n".join([text.replace("\n", " "), *lines]))
        finally:
            sys.stdout.flush()
            os._exit(code)


def frames(trace):
    """The frames of a traceback, the innermost first."""
    found = []
    while trace:
        found.insert(0, SimpleNamespace(filename=trace.tb_frame.f_code.co_filename, lineno=trace.tb_lineno))
        trace = trace.tb_next
    return found


def wait(children, folder):
    """The exit codes of all. Who still runs at the end, or a second after one has failed, says where, and is killed.

    The end is there, too, when nobody has computed for a while: then all wait for each other.
    """
    codes, end = {}, STARTED + LIMIT
    processes, spent, since = [psutil.Process(child) for child in children], 0, time.monotonic()
    while len(codes) < len(children) and time.monotonic() < min(end, since + STILL):
        now = sum(sum(process.cpu_times()[:2]) for rank, process in enumerate(processes) if rank not in codes)
        if abs(now - spent) > 0.05:
            spent, since = now, time.monotonic()
        for rank, child in enumerate(children):
            if rank not in codes and os.waitpid(child, os.WNOHANG)[0]:
                codes[rank] = 0 if (folder / f"{rank}.value").exists() else 1
                if codes[rank]:
                    end = min(end, time.monotonic() + 1)
        time.sleep(0.01)
    late = [rank for rank in range(len(children)) if rank not in codes]
    for rank in late:
        os.kill(children[rank], signal.SIGUSR1)
    time.sleep(0.2 if late else 0)
    for rank in late:
        os.kill(children[rank], signal.SIGKILL)
        os.waitpid(children[rank], 0)
    return codes


def complain(file, codes, folder):
    """Raise what the learner has to know if not every rank has come to its end."""
    failed = [rank for rank, code in codes.items() if code]
    for rank in failed:
        if not (folder / f"{rank}.problem").exists():
            if "collective mismatch" in (folder / f"{rank}.out").read_text():  # then gloo ends the process
                raise NotRun(f"rank {rank} receives a message of another size than it waits for: at the same time the "
                             "ranks call different collectives, or one of them skips some")
            raise NotRun(f"rank {rank} ended before its function returned")
        text, *places = (folder / f"{rank}.problem").read_text().splitlines()
        line = next((number for name, number in zip(places[::2], places[1::2]) if name == str(file)), None)
        if text.startswith("NotImplementedError"):
            raise NotRun(f"line {line} of {file.name} waits for your lines")
        raise NotRun(f"{file.name}, {f'line {line}, ' if line else ''}on rank {rank}: {text}")
    late = [rank for rank in range(len(list(folder.glob("*.out")))) if rank not in codes]
    if late:
        places = []
        for rank in late:
            with contextlib.suppress(OSError):
                place = (folder / f"{rank}.place").read_text()
                lines = re.findall(rf'File "{re.escape(str(file))}", line (\d+)', place)
                places.append(f"rank {rank} at line {lines[0]}" if lines else f"rank {rank} outside of {file.name}")
        raise NotRun(f"no end: a loop, or ranks that wait for each other: {', '.join(places)}")


def counted():
    """A list to which each communication of this rank is added from now on: (operation, elements, bytes, peer or None).

    Call it before the learner's file is loaded, which may import the functions by name.
    """
    calls = []

    def watched(name, original):
        def call(*args, **kwargs):
            tensors = [arg for arg in [*args, *kwargs.values()] if torch.is_tensor(arg)]
            tensors += [part for arg in [*args, *kwargs.values()] if isinstance(arg, list) for part in arg
                        if torch.is_tensor(part)]
            sent = tensors[-1] if tensors else torch.empty(0)
            peer = kwargs.get("dst", kwargs.get("src", args[1] if len(args) > 1 and isinstance(args[1], int) else None))
            calls.append((name, sent.numel(), sent.numel() * sent.element_size(), peer))
            return original(*args, **kwargs)
        return call
    for name in COLLECTIVES:
        setattr(dist, name, watched(name, getattr(dist, name)))
    return calls


def learner(file):
    """The learner's module."""
    sys.path.insert(0, str(file.parent))
    return load(file, "exercise")
