"""A slow link between ranks on one machine, and the timeline of a step over it.

"slow_link" is a backend of torch.distributed: gloo in a thread, which sleeps after each collective
as long as the link would take. So communication takes time but no core, as between GPUs.
"""

import math
import queue
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.futures import Future

BANDWIDTH = 0.1e9  # bytes/s that a rank sends
LATENCY = 4e-3  # seconds per collective
CHARACTERS = 68  # of the first timeline


LETTERS = {"all_reduce": "=", "broadcast": "=", "all_gather": "g", "reduce_scatter": "r"}


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
    def begin(self) -> float:
        return self.phases[0][1]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


step = Step()  # the current one of this process


class Work(dist.Work):
    """The handle of a collective."""

    def __init__(self):
        super().__init__()
        self.future = Future()

    def wait(self, timeout=None):
        begin = time.perf_counter()
        self.future.wait()
        step.waits.append((begin, time.perf_counter()))
        return True

    def get_future(self):
        return self.future


class SlowLink(dist.ProcessGroup):
    """gloo's collectives, one after the other, each followed by the link's time."""

    def __init__(self, store, rank, world_size, timeout):
        super().__init__(rank, world_size)
        self.gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        self.queue = queue.Queue()
        threading.Thread(target=self.carry_out_all, daemon=True).start()

    def getBackendName(self):
        return "slow_link"

    def carry_out_all(self):
        while True:
            work, result, collective, transfer, copies = self.queue.get()
            transfer.begin = time.perf_counter()
            originals = [copy.clone() for copy in copies]
            try:
                collective().wait()
            except Exception as problem:  # the waiting thread raises it
                work.future.set_exception(problem)
                continue
            rounds = 2 if transfer.kind == "all_reduce" else 1  # of a ring
            sent_bytes = rounds * transfer.bytes * (self.size() - 1) / self.size()
            time.sleep(LATENCY + sent_bytes / BANDWIDTH)
            transfer.end = time.perf_counter()
            if transfer.kind == "all_reduce" and not all(map(torch.equal, result, originals)):
                work.future.set_exception(RuntimeError(
                    "a tensor was changed between its all_reduce and the handle's wait()"))
                continue
            tensors = result[0] if transfer.kind == "all_gather" else result
            for tensor, copy in zip(tensors, copies):
                tensor.data.copy_(copy)  # only now, so that before wait() the old values are there
            work.future.set_result(result)

    def issue(self, kind, result, copies, collective, tensors):
        """Put a collective into the queue, and return its handle.

        result: the tensors that the caller will read; copies: those that the collective writes;
        tensors: the whole ones
        """
        work = Work()
        tensor_bytes = sum(tensor.nbytes for tensor in tensors)
        transfer = Transfer(kind, tensor_bytes, time.perf_counter())
        step.transfers.append(transfer)
        self.queue.put((work, result, collective, transfer, copies))
        return work

    def allreduce(self, tensors, opts):
        copies = [tensor.detach().clone() for tensor in tensors]
        return self.issue("all_reduce", tensors, copies,
                          lambda: self.gloo.allreduce(copies, opts), tensors)

    def broadcast(self, tensors, opts):
        copies = [tensor.detach().clone() for tensor in tensors]
        return self.issue("broadcast", tensors, copies,
                          lambda: self.gloo.broadcast(copies, opts), tensors)

    def allgather(self, outputs, inputs, opts):
        copies = [torch.empty_like(tensor) for tensor in outputs[0]]
        return self.issue("all_gather", outputs, copies,
                          lambda: self.gloo.allgather([copies], inputs, opts), outputs[0])

    def reduce_scatter(self, outputs, inputs, opts):
        copies = [torch.empty_like(tensor) for tensor in outputs]
        return self.issue("reduce_scatter", outputs, copies,
                          lambda: self.gloo.reduce_scatter(copies, inputs, opts), inputs[0])

    def all_gather_single(self, output, tensor, opts):
        parts = list(output.chunk(self.size()))
        return self.allgather([parts], [tensor], dist.distributed_c10d.AllgatherOptions())

    def reduce_scatter_single(self, output, tensor, opts):
        options = dist.ReduceScatterOptions()
        options.reduceOp = opts.reduceOp
        return self.reduce_scatter([output], [list(tensor.chunk(self.size()))], options)

    _allgather_base = all_gather_single  # its name in older PyTorch
    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts):
        return self.issue("barrier", [], [], self.gloo.barrier, [])


dist.Backend.register_backend("slow_link", SlowLink, devices=["cpu"])


def record_step(function: Callable[[Step], None]) -> Step:
    """Run function(step) on all ranks at the same time, and return what this rank did."""
    global step
    dist.barrier()
    step = recorded = Step()
    function(recorded)
    recorded.end = time.perf_counter()
    step = Step()  # for the next barrier
    return recorded


def median_step(function: Callable[[Step], None], count: int = 4) -> Step:
    """Return the step of median duration among `count`, after one that does not count."""
    record_step(function)
    steps = [record_step(function) for _ in range(count)]
    median = statistics.median_low(recorded.seconds for recorded in steps)
    return next(recorded for recorded in steps if recorded.seconds == median)


def draw_step(name: str, recorded: Step, scale: float) -> None:
    """Print a step's times, and two rows: what the rank does, and its link. scale: s/character."""
    exposed = sum(end - begin for begin, end in recorded.waits)
    sending = sum(transfer.end - transfer.begin for transfer in recorded.transfers)
    print(f"  {name}: {1e3 * recorded.seconds:.0f} ms, of which {1e3 * exposed:.0f} ms wait for "
          f"the link (exposed); hidden: {max(0, 1e3 * (sending - exposed)):.0f} ms")
    rank, link = "", ""
    for character in range(round(recorded.seconds / scale)):
        now = recorded.begin + (character + 0.5) * scale
        letters = [letter for letter, begin in recorded.phases if begin <= now]
        is_waiting = any(begin <= now <= end for begin, end in recorded.waits)
        rank += "." if is_waiting else letters[-1]
        kinds = [transfer.kind for transfer in recorded.transfers
                 if transfer.begin <= now <= transfer.end]
        link += LETTERS[kinds[0]] if kinds else " "
    print(f"    rank 0  {rank}\n    link    {link}")
