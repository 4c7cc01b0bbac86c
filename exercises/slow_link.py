"""A slow link between ranks on one machine, and the timeline of a step over it.

"slow_link" is a backend of torch.distributed: gloo in a thread, which sleeps after each collective
as long as the link would take. So communication takes time but no core, as between GPUs.
"""

import queue
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.futures import Future

BANDWIDTH = 0.1e9  # bytes/s that a rank sends
LATENCY = 4e-3  # seconds per collective
CHARACTERS = 60  # of the first timeline


@dataclass
class Step:
    """What one rank did in a step, in seconds of time.perf_counter()."""
    phases: list = field(default_factory=list)  # (letter, begin)
    transfers: list = field(default_factory=list)  # (bytes of the tensors, issued, begin, end)
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


class Transfer(dist.Work):
    """A collective that has been issued."""

    def __init__(self, result):
        super().__init__()
        self.tensors = result
        self.future = Future()

    def wait(self, timeout=None):
        begin = time.perf_counter()
        self.future.wait()
        step.waits.append((begin, time.perf_counter()))
        return True

    def get_future(self):
        return self.future

    def is_completed(self):
        return self.future.done()


class SlowLink(dist.ProcessGroup):
    """gloo's collectives, one after the other, each followed by the link's time."""

    def __init__(self, store, rank, world_size, timeout):
        super().__init__(rank, world_size)
        self.gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        self.queue = queue.Queue()
        threading.Thread(target=self.transfer_all, daemon=True).start()

    def getBackendName(self):
        return "slow_link"

    def transfer_all(self):
        while True:
            transfer, collective, tensor_bytes, sent_bytes, issued = self.queue.get()
            begin = time.perf_counter()
            try:
                collective().wait()
            except Exception as problem:  # the waiting thread raises it
                transfer.future.set_exception(problem)
                continue
            time.sleep(LATENCY + sent_bytes / BANDWIDTH)
            step.transfers.append((tensor_bytes, issued, begin, time.perf_counter()))
            transfer.future.set_result(transfer.tensors)

    def put(self, result, collective, tensors, rounds=1):
        """Issue a collective. rounds: 1 for half an all-reduce, 2 for a whole one."""
        transfer = Transfer(result)
        tensor_bytes = sum(tensor.nbytes for tensor in tensors)
        sent_bytes = rounds * tensor_bytes * (self.size() - 1) / self.size()  # in a ring
        self.queue.put((transfer, collective, tensor_bytes, sent_bytes, time.perf_counter()))
        return transfer

    def allreduce(self, tensors, opts):
        return self.put(tensors, lambda: self.gloo.allreduce(tensors, opts), tensors, 2)

    def broadcast(self, tensors, opts):
        return self.put(tensors, lambda: self.gloo.broadcast(tensors, opts), tensors)

    def allgather(self, outputs, inputs, opts):
        return self.put(
            outputs, lambda: self.gloo.allgather(outputs, inputs, opts), outputs[0])

    def reduce_scatter(self, outputs, inputs, opts):
        return self.put(
            outputs, lambda: self.gloo.reduce_scatter(outputs, inputs, opts), inputs[0])

    def barrier(self, opts):
        return self.put([], self.gloo.barrier, [])


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
    sending = sum(end - begin for *_, begin, end in recorded.transfers)
    print(f"  {name}: {1e3 * recorded.seconds:.0f} ms, of which {1e3 * exposed:.0f} ms wait for "
          f"the link (exposed); hidden: {max(0, 1e3 * (sending - exposed)):.0f} ms")
    rank, link = "", ""
    for character in range(round(recorded.seconds / scale)):
        now = recorded.begin + (character + 0.5) * scale
        letters = [letter for letter, begin in recorded.phases if begin <= now]
        is_waiting = any(begin <= now <= end for begin, end in recorded.waits)
        rank += "." if is_waiting else letters[-1]
        is_sending = any(begin <= now <= end for *_, begin, end in recorded.transfers)
        link += "=" if is_sending else " "
    print(f"    rank 0  {rank}\n    link    {link}")
