"""Run a learner's functions on ranks that are forked from this process, so that torch is imported once."""

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import psutil
import torch
import torch.distributed as dist

STARTED = time.monotonic()
LOOP = 6  # s that a rank computes, of its own time: a busy machine takes longer. Solutions compute for less than one
STILL = 4  # s without computing
LIMIT = 60  # s since the start, whatever the ranks do
SHOWN = 20  # lines of a rank's output, the last ones
MESSAGES = "send", "recv", "isend", "irecv"
OPERATIONS = (*MESSAGES, "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
              "all_gather_single", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor",
              "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier")


class NotRun(Exception):
    """The learner's file did not run to its end: the text says where and why."""


def on_ranks(file: Path, function: Callable[[int], object], ranks: int, meet: bool = True) -> list:
    """The values of function(rank), called in `ranks` processes that have a process group over gloo.

    Without `meet` the learner's file makes it. Prints what the ranks print. Raises NotRun, with the learner's own
    line, if one of them raises or ends, or is not done in time.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        processes = [fork.Process(target=be_rank, args=(rank, ranks, folder, file, function, meet))
                     for rank in range(ranks)]
        try:
            for process in processes:
                process.start()
            ended = wait(processes, folder)
        finally:
            begun = [process for process in processes if process.pid]
            for process in begun:
                process.kill()
            for process in begun:
                process.join()
        for rank in range(ranks):
            for line in text_of(folder / f"{rank}.out").splitlines()[-SHOWN:]:
                print(f"  rank {rank} prints: {line}")
        complain(folder, file, ranks, ended)
        return [pickle.loads((folder / f"{rank}.value").read_bytes()) for rank in range(ranks)]


def be_rank(rank, ranks, folder, file, function, meet):
    """The life of a forked process: it leaves a value, or a problem and when that came up."""
    out = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.register(signal.SIGUSR1, open(folder / f"{rank}.place", "w"))
    try:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        warnings.simplefilter("ignore")  # PyTorch's, of new names for collectives and the like, once a rank
        if meet:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
            dist.barrier()  # all are connected before one may end
        value = function(rank)
        sys.stdout.flush()
        leave(folder / f"{rank}.value", value)
        time.sleep(LIMIT)  # others may still need its connections: on_ranks ends all together
    except BaseException as problem:
        leave(folder / f"{rank}.problem", (time.monotonic(), told(problem, file, rank)))
    finally:
        sys.stdout.flush()
        os._exit(1)


def leave(path, value):
    """A file that is there with all its content, or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


def told(problem, file, rank):
    """An exception and the learner's line in one line of text."""
    lines = [line for frame, line in traceback.walk_tb(problem.__traceback__) if frame.f_code.co_filename == str(file)]
    if lines and isinstance(problem, NotImplementedError) and not problem.args:
        return f"line {lines[-1]} of {file.name} waits for your lines"
    where = f"{file.name}, line {lines[-1]}" if lines else file.name
    return " ".join(f"{where}, on rank {rank}: {type(problem).__name__}: {problem}".split())


def wait(processes, folder):
    """Wait until all ranks have left a value, one has ended without, or a limit is reached; the ranks that ended.

    A limit is reached, too, when nobody has computed for a while: then all wait for each other. Those that have not
    ended leave a file that says at which line they are.
    """
    end, spent, since = STARTED + LIMIT, 0, time.monotonic()
    late = range(len(processes))
    while late and time.monotonic() < min(end, since + STILL):
        time.sleep(0.01)
        late = [rank for rank in late if not (folder / f"{rank}.value").exists()]
        if not all(process.is_alive() for process in processes):
            end = min(end, time.monotonic() + 1)  # another one may have a problem that came up before
        with contextlib.suppress(psutil.Error):  # one that ends just now
            each = [sum(psutil.Process(processes[rank].pid).cpu_times()[:2]) for rank in late]
            if max(each, default=0) > LOOP:
                break
            if abs(sum(each) - spent) > 0.05:
                spent, since = sum(each), time.monotonic()
    ended = [rank for rank, process in enumerate(processes) if not process.is_alive()]
    if late:
        for rank in set(late) - set(ended):
            os.kill(processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)
    return ended


def complain(folder, file, ranks, ended):
    """Raise what the learner has to know if not every rank has come to its end."""
    for rank in ended:
        if not (folder / f"{rank}.problem").exists():
            raise NotRun(f"rank {rank} ended before its function returned. (Of its own accord, or by gloo, which ends "
                         "a rank that receives a message of another size than it has room for)")
    problems = [pickle.loads(path.read_bytes()) for path in folder.glob("*.problem")]
    if problems:
        raise NotRun(min(problems)[1])  # what came first is the cause of the others
    places = []
    for rank in range(ranks):
        lines = re.findall(rf'File "{re.escape(str(file))}", line (\d+)', text_of(folder / f"{rank}.place"))
        place = f"at line {lines[0]}" if lines else f"outside of {file.name}"
        places.append(f"rank {rank} {'is done' if (folder / f'{rank}.value').exists() else place}")
    if not all(place.endswith("is done") for place in places):
        raise NotRun("not at its end in time: slow, a loop, or ranks that wait for each other (a send ends when the "
                     f"other rank receives, a collective when all call it): {', '.join(places)}")


def text_of(path):
    return path.read_text(errors="replace") if path.exists() else ""


def counted() -> list:
    """A list to which each communication of this rank is added from now on: (operation, elements, peer or None).

    Call it before the learner's file is loaded, which may import the functions by name. What isend and irecv return is
    kept: a request that is dropped would not be carried out, and the other rank hang.
    """
    calls, within, requests = [], [], []

    def watched(name, original):
        def call(*args, **kwargs):
            if within:  # dist.send calls dist.isend
                return original(*args, **kwargs)
            given = [*args, *kwargs.values()]
            tensors = [one for one in given if torch.is_tensor(one)]
            tensors += [part for one in given if isinstance(one, list) for part in one if torch.is_tensor(part)]
            peer = args[1] if args[1:] else kwargs.get("dst", kwargs.get("src"))
            others = set(range(dist.get_world_size())) - {dist.get_rank()}
            if name in MESSAGES and isinstance(peer, int) and peer not in others:  # gloo hangs, or has no plain words
                raise ValueError(f"{name}: there is no rank {peer} beside rank {dist.get_rank()}")
            calls.append((name, tensors[-1].numel() if tensors else 0, peer))
            within.append(name)
            try:
                requests.append(original(*args, **kwargs))
                return requests[-1]
            finally:
                within.pop()
        return call
    for name in set(OPERATIONS) & set(dir(dist)):  # some are of newer PyTorch
        call = watched(name, getattr(dist, name))
        for module in (dist, dist.distributed_c10d):  # there batch_isend_irecv finds it
            setattr(module, name, call)
    return calls


def learner(file: Path) -> ModuleType:
    """The learner's module."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location("exercise", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What several checks compare.

def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A copy of the numbers of all tensors, end to end."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def same(one: object, other: torch.Tensor) -> bool:
    """Whether the first is a tensor like the second but for rounding, in fp64."""
    alike = torch.is_tensor(one) and (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and torch.allclose(one, other, rtol=1e-8, atol=1e-10)
