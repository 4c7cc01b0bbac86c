"""A slow link between ranks on one machine, and the timeline of a step over it.

A thread carries out each collective, with gloo, and sleeps as long as the link would take. So
communication takes time but no core, as between GPUs.
"""

import inspect
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from runner import on_ranks

BANDWIDTH = 0.1e9  # bytes/s that a rank sends
LATENCY = 4e-3  # seconds per collective
CHARACTERS = 68  # of the first timeline
LETTERS = {"all_reduce": "=", "broadcast": "=", "all_gather": "g", "reduce_scatter": "r",
           "barrier": " "}
FUNCTIONS = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single",
             "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "barrier")


@dataclass
class Transfer:
    """A collective, and when the rank has issued it, and the link begins and ends."""
    kind: str
    bytes: int  # of the whole tensor
    issued: float
    begin: float = math.inf
    end: float = math.inf


@dataclass
class Step:
    """What one rank did in a step, in seconds of time.perf_counter()."""
    phases: list = field(default_factory=list)  # (letter, begin)
    transfers: list = field(default_factory=list)
    waits: list = field(default_factory=list)  # (begin, end) of waits for a transfer
    end: float = 0

    def begin_phase(self, letter: str):
        self.phases.append((letter, time.perf_counter()))

    @property
    def seconds(self) -> float:
        return self.end - self.phases[0][1]


step = Step()  # the current one of this process


@dataclass
class Work:
    """The handle of a collective."""
    future: Future

    def wait(self):
        begin = time.perf_counter()
        self.future.result()
        step.waits.append((begin, time.perf_counter()))


def slow_down():
    """Let this rank's collectives use the slow link. Call it before load_exercise()."""
    link = ThreadPoolExecutor(1)

    def make_slow(original):
        signature = inspect.signature(original)

        def issue(*args, **kwargs):
            arguments = signature.bind(*args, **kwargs).arguments
            is_asynchronous = arguments.pop("async_op", False)
            groups = [tensors_of(value) for value in arguments.values()]
            kind = next(kind for kind in LETTERS if original.__name__.startswith(kind))
            whole = max((sum(tensor.nbytes for tensor in group) for group in groups), default=0)
            transfer = Transfer(kind, whole, time.perf_counter())
            step.transfers.append(transfer)
            outputs = groups[0] if groups else []
            copies = [tensor.detach().clone() for tensor in outputs]
            if outputs:
                name, value = next(iter(arguments.items()))
                arguments[name] = copies[0] if torch.is_tensor(value) else copies
            work = Work(link.submit(carry_out, original, arguments, outputs, copies, transfer))
            return work if is_asynchronous else work.wait()
        return issue

    for name in filter(vars(dist).get, FUNCTIONS):
        setattr(dist, name, make_slow(getattr(dist, name)))


def tensors_of(argument):
    if torch.is_tensor(argument):
        return [argument]
    return argument if isinstance(argument, (list, tuple)) else []


def carry_out(collective, arguments, outputs, copies, transfer):
    """Run the collective on copies of its outputs, and write these at the end of the transfer."""
    transfer.begin = time.perf_counter()
    originals = [copy.clone() for copy in copies]
    collective(**arguments)
    rounds = 2 if transfer.kind == "all_reduce" else 1  # of a ring
    sent_bytes = rounds * transfer.bytes * (dist.get_world_size() - 1) / dist.get_world_size()
    time.sleep(LATENCY + sent_bytes / BANDWIDTH)
    transfer.end = time.perf_counter()
    if transfer.kind == "all_reduce" and not all(map(torch.equal, outputs, originals)):
        raise RuntimeError("a tensor was changed between its all_reduce and the handle's wait()")
    for tensor, copy in zip(outputs, copies):
        tensor.data.copy_(copy)


def record_step(function: Callable[[Step], None]) -> Step:
    """Run function(step) on all ranks at the same time, and return what this rank did."""
    global step
    dist.barrier()
    step = recorded = Step()
    function(recorded)
    recorded.end = time.perf_counter()
    step = Step()  # for the next barrier
    return recorded


def time_step(file: Path, make_step: Callable[[], Callable[[Step], None]], name: str,
              scale: float | None) -> float:
    """Time a step on two ranks, and print what rank 0 and its link do. Return scale, s/character.

    Of four steps, after one that does not count, it is that with the median duration.
    """
    def run_exercise(rank):
        slow_down()
        run_step = make_step()
        steps = [record_step(run_step) for _ in range(5)][1:]
        return sorted(steps, key=lambda recorded: recorded.seconds)[1]

    recorded = on_ranks(file, run_exercise, 2)[0]
    scale = scale or recorded.seconds / CHARACTERS
    exposed = sum(end - begin for begin, end in recorded.waits)
    sending = sum(transfer.end - transfer.begin for transfer in recorded.transfers)
    print(f"  {name}: {1e3 * recorded.seconds:.0f} ms, of which {1e3 * exposed:.0f} ms wait for "
          f"the link (exposed); hidden: {max(0, 1e3 * (sending - exposed)):.0f} ms")
    rank, link = "", ""
    for character in range(round(recorded.seconds / scale)):
        now = recorded.phases[0][1] + (character + 0.5) * scale
        letters = [letter for letter, begin in recorded.phases if begin <= now]
        is_waiting = any(begin <= now <= end for begin, end in recorded.waits)
        rank += "." if is_waiting else letters[-1]
        kinds = [transfer.kind for transfer in recorded.transfers
                 if transfer.begin <= now <= transfer.end]
        link += LETTERS[kinds[0]] if kinds else " "
    print(f"    rank 0  {rank}\n    link    {link}")
    return scale
