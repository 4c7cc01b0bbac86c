"""The collectives that a rank calls: do all ranks call the same ones, in one order?"""

import multiprocessing.process
import sys
from collections.abc import Callable

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d

from . import frames
from .hooks import around, harmless

REDUCE = ("all_reduce", "broadcast", "reduce")  # their tensors have to be equally large
COLLECTIVES = (
    *REDUCE, "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
    "gather", "scatter", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


class Calls:
    """Before a collective of all ranks, `join(number, call, place)` compares it with theirs.

    Those of DistributedDataParallel and Horovod come from C++: they are not seen.
    """

    def __init__(self, script: str, world_size: int, join: Callable[[int, str, str], None],
                 spawns: Callable[[str], None]):
        self.script, self.world_size, self.join, self.spawns = script, world_size, join, spawns
        self.depth = self.number = 0
        self.names = set()  # of the collectives that were called
        self.now = ""  # the collective that is under way
        self.started = ""  # where the script started a process

    def install(self):
        for name in COLLECTIVES:
            before = self.note(name)
            for module in dist, distributed_c10d:
                around(module, name, before, self.ends)
        around(sys.modules["torch.multiprocessing.spawn"], "start_processes", self.note_spawn)
        mp.start_processes = sys.modules["torch.multiprocessing.spawn"].start_processes
        around(multiprocessing.process.BaseProcess, "start", self.note_process)

    def note(self, name):
        @harmless
        def begin(*args, **kwargs):
            self.depth += 1
            self.names.add(name)
            arguments = [*args, *kwargs.values()]
            groups = [value for value in arguments if isinstance(value, dist.ProcessGroup)]
            of_all = all(group is dist.group.WORLD for group in groups)
            does_not_wait = any(value is True for value in arguments[1:])  # async_op
            if (self.depth > 1 or not of_all or does_not_wait
                    or dist.get_world_size() != self.world_size):
                return
            self.number += 1
            self.now = name
            tensor = arguments[0] if arguments and name in REDUCE else None
            size = f" of {tensor.numel()} numbers" if hasattr(tensor, "numel") else ""
            self.join(self.number, f"{name}{size}", self.place())

        return begin

    @harmless
    def ends(self, *_, **__):
        self.depth -= 1
        if not self.depth:
            self.now = ""

    @harmless
    def note_spawn(self, *_, **__):
        self.spawns(self.place())

    @harmless
    def note_process(self, process):
        target = getattr(process, "_target", None)
        if not getattr(target, "__module__", "torch.").startswith(("torch.", "multiprocessing.")):
            self.started = self.place()

    def place(self):
        return frames.places(sys._getframe(), self.script)[0]
