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
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace

import psutil
import torch
import torch.distributed as dist
from grade import load

STARTED = time.monotonic()
LOOP = 6  # s that a rank computes, of its own time: a busy machine takes longer. Solutions compute for less than one
STILL = 4  # s without computing
LIMIT = 60  # s since the start, whatever the ranks do
SHOWN = 20  # lines of a rank's output
GLOO = "terminate called", "what():  [enforce fail", "gloo::"  # of a rank that gloo aborts: the hint says why
PRINTED = []  # the ranks' output, in the learner's own words
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single",
               "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all",
               "all_to_all_single", "barrier", "send", "recv", "isend", "irecv")


class NotRun(Exception):
    """The learner's file did not run to its end: the text says where and why."""


class NoEnd(NotRun):
    """Some ranks were still busy, or waiting, when the time was over."""

    last = MappingProxyType({})  # of in_stages: rank -> the communication that it has begun last, as counted() has it


def show_printed() -> None:
    """What the learner's file has printed, and of which rank."""
    for rank, text in PRINTED:
        lines = [line for line in text.splitlines() if not any(word in line for word in GLOO)]
        if len(lines) > SHOWN:
            print(f"  rank {rank} prints {len(lines) - SHOWN} lines, and:")
        for line in lines[-SHOWN:]:
            print(f"  rank {rank} prints: {line}")


def on_ranks(file: Path, function: Callable[[int], object], ranks: int, meet: bool = True) -> list:
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
        PRINTED.extend((rank, (folder / f"{rank}.out").read_text()) for rank in range(ranks))
        complain(file, codes, folder)
        return [pickle.loads((folder / f"{rank}.value").read_bytes()) for rank in range(ranks)]


def in_stages(file: Path, stages: dict[str, Callable], ranks: int) -> dict:
    """{name: the facts of all ranks} for the functions of {name: function(rank, exercise, calls)}, called in turn.

    `exercise` is the learner's module, `calls` is what counted() counts in this stage. The stage that does not come to
    its end on all ranks is the last, its value the NotRun. Where that is the first one, it is raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)

        def on_rank(rank):
            calls = counted(Noted(folder / f"{rank}.last"))
            exercise = learner(file)
            for name, stage in stages.items():
                calls.clear()
                fact = stage(rank, exercise, calls)
                (folder / f"{rank}.part").write_bytes(pickle.dumps(fact))
                (folder / f"{rank}.part").rename(folder / f"{rank}.{name}")
        problem = None
        try:
            on_ranks(file, on_rank, ranks)
        except NotRun as found:
            problem = found
            problem.last = {int(path.stem): pickle.loads(path.read_bytes()) for path in folder.glob("*.last")}
        facts = {}
        for name in stages:
            paths = [folder / f"{rank}.{name}" for rank in range(ranks)]
            if not all(path.exists() for path in paths):
                facts[name] = problem
                break
            facts[name] = [pickle.loads(path.read_bytes()) for path in paths]
    if facts[next(iter(stages))] is problem and problem:
        raise problem
    return facts


class Noted(list):
    """A list whose last item another process can read when this one hangs."""

    def __init__(self, path):
        self.path = path

    def append(self, item):
        super().append(item)
        self.path.with_suffix(".new").write_bytes(pickle.dumps(item))
        self.path.with_suffix(".new").rename(self.path)

    def clear(self):
        super().clear()
        self.path.unlink(missing_ok=True)


def be_rank(folder, function, rank, ranks, meet):
    """The life of a forked process."""
    out = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    with open(folder / f"{rank}.place", "w") as place:
        faulthandler.register(signal.SIGUSR1, place)
        try:
            torch.set_num_threads(1)
            torch.manual_seed(rank)
            warnings.simplefilter("ignore")  # PyTorch's, of new names for collectives and the like, once a rank
            if meet:
                dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
                dist.barrier()  # all are connected before one may end
            value = function(rank)
            sys.stdout.flush()
            (folder / f"{rank}.part").write_bytes(pickle.dumps(value))
            (folder / f"{rank}.part").rename(folder / f"{rank}.value")
            time.sleep(LIMIT)  # others may still need its connections: on_ranks ends all together
        except BaseException as problem:
            text = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
            lines = [f"{frame.filename}\n{frame.lineno}" for frame in frames(problem.__traceback__)]
            report = [str(time.monotonic_ns()), text.replace("\n", " "), *lines]
            (folder / f"{rank}.problem").write_text("\n".join(report))
        finally:
            sys.stdout.flush()
            os._exit(1)


def frames(trace):
    """The frames of a traceback, the innermost first."""
    found = []
    while trace:
        found.insert(0, SimpleNamespace(filename=trace.tb_frame.f_code.co_filename, lineno=trace.tb_lineno))
        trace = trace.tb_next
    return found


def wait(children, folder):
    """The exit codes of all that came to an end. At a limit, or a second after one has failed, others say where.

    So they do when nobody has computed for a while: then all wait for each other.
    """
    codes, ended, end = {}, set(), STARTED + LIMIT
    processes, spent, since, most = [psutil.Process(child) for child in children], 0, time.monotonic(), 0
    while len(codes) < len(children) and time.monotonic() < min(end, since + STILL) and most < LOOP:
        for rank in set(range(len(children))) - set(codes):
            if os.waitpid(children[rank], os.WNOHANG)[0]:
                ended.add(rank)
                codes[rank] = 1
                end = min(end, time.monotonic() + 1)
            elif (folder / f"{rank}.value").exists():
                codes[rank] = 0
        with contextlib.suppress(psutil.Error):  # one that ends just now
            each = [sum(process.cpu_times()[:2]) for rank, process in enumerate(processes) if rank not in codes]
            most = max([most, *each])
            if abs(sum(each) - spent) > 0.05:
                spent, since = sum(each), time.monotonic()
        time.sleep(0.01)
    late = set(range(len(children))) - set(codes)
    for rank in late:
        os.kill(children[rank], signal.SIGUSR1)
    time.sleep(0.2 if late else 0)
    for rank in set(range(len(children))) - ended:
        os.kill(children[rank], signal.SIGKILL)
        os.waitpid(children[rank], 0)
    return codes


def complain(file, codes, folder):
    """Raise what the learner has to know if not every rank has come to its end."""
    failed = [rank for rank, code in codes.items() if code]
    for rank in failed:
        if not (folder / f"{rank}.problem").exists():
            if "collective mismatch" in (folder / f"{rank}.out").read_text():  # then gloo ends the process
                raise NotRun(f"rank {rank} receives a message of another size than it waits for: its room is not as "
                             "long as what comes in, or the ranks call different collectives at the same time")
            raise NotRun(f"rank {rank} ended before its function returned")
    problems = {rank: (folder / f"{rank}.problem").read_text().splitlines() for rank in failed}
    for rank in sorted(failed, key=lambda rank: int(problems[rank][0])):  # what came first is the cause of the others
        _, text, *places = problems[rank]
        line = next((number for name, number in zip(places[::2], places[1::2]) if name == str(file)), None)
        if text.startswith("NotImplementedError"):
            raise NotRun(f"line {line} of {file.name} waits for your lines")
        raise NotRun(f"{file.name}, {f'line {line}, ' if line else ''}on rank {rank}: {text}")
    ranks = range(len(list(folder.glob("*.out"))))
    if len(codes) < len(ranks):
        places = [f"rank {rank} is done" for rank in codes]
        for rank in set(ranks) - set(codes):
            with contextlib.suppress(OSError):
                place = (folder / f"{rank}.place").read_text()
                lines = re.findall(rf'File "{re.escape(str(file))}", line (\d+)', place)
                places.append(f"rank {rank} at line {lines[0]}" if lines else f"rank {rank} outside of {file.name}")
        where = ", ".join(sorted(places))
        raise NoEnd(f"not at its end in time: slow, a loop, or ranks that wait for each other: {where}")


def counted(calls: list | None = None) -> list:
    """A list to which each communication of this rank is added from now on: (operation, elements, bytes, peer or None).

    Call it before the learner's file is loaded, which may import the functions by name. What isend and irecv return is
    kept: a request that is dropped would not be carried out, and the other rank hang.
    """
    calls, within, requests = [] if calls is None else calls, [], []

    def watched(name, original):
        def call(*args, **kwargs):
            if within:  # dist.send calls dist.isend
                return original(*args, **kwargs)
            tensors = [arg for arg in [*args, *kwargs.values()] if torch.is_tensor(arg)]
            tensors += [part for arg in [*args, *kwargs.values()] if isinstance(arg, list) for part in arg
                        if torch.is_tensor(part)]
            sent = tensors[-1] if tensors else torch.empty(0)
            peers = [kwargs[word] for word in ("dst", "src", "group_dst", "group_src") if word in kwargs]
            peers += [arg for arg in args[1:2] if isinstance(arg, int)]
            refuse_peers(name, peers)
            calls.append((name, sent.numel(), sent.numel() * sent.element_size(), peers[0] if peers else None))
            within.append(name)
            try:
                requests.append(original(*args, **kwargs))
                return requests[-1]
            finally:
                within.pop()
        return call
    for name in set(COLLECTIVES) & set(dir(dist)):  # some are of newer PyTorch
        call = watched(name, getattr(dist, name))
        for module in (dist, dist.distributed_c10d):  # there batch_isend_irecv finds it
            setattr(module, name, call)
    return calls


def refuse_peers(name, peers):
    """gloo hangs, or has no plain words, where a message goes to nobody or to oneself."""
    if name not in ("send", "isend", "recv", "irecv"):
        return
    for peer in peers:
        if peer not in range(dist.get_world_size()):
            raise ValueError(f"{name}: there is no rank {peer}, the last one is {dist.get_world_size() - 1}")
        if peer == dist.get_rank():
            raise ValueError(f"{name}: rank {peer} is this rank itself")


def learner(file: Path) -> ModuleType:
    """The learner's module."""
    sys.path.insert(0, str(file.parent))
    return load(file, "exercise")
