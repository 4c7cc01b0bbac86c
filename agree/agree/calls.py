"""Records the collectives that a rank calls, to check that all ranks call the same sequence."""

import sys
from collections.abc import Callable

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d

from . import frames
from .hooks import never_raise, wrap_method

EQUAL_SIZES = ("all_reduce", "broadcast", "reduce")  # of the tensors on all ranks
COLLECTIVES = (
    *EQUAL_SIZES, "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
    "gather", "scatter", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


class Calls:
    """Hooks that call on_call(number, call, place) before each collective of the world group.

    The collectives that DistributedDataParallel and Horovod call from C++ are not seen.
    """

    def __init__(self, script: str, world_size: int, on_call: Callable[[int, str, str], None],
                 on_spawn: Callable[[str], None]):
        self.script, self.world_size = script, world_size
        self.on_call, self.on_spawn = on_call, on_spawn
        self.depth = self.number = 0  # nesting level; collectives of the world group so far
        self.names = set()  # of the collectives called
        self.current = ""  # the collective in progress

    def install(self):
        for name in COLLECTIVES:
            before = self.begin_hook(name)
            for module in dist, distributed_c10d:
                wrap_method(module, name, before, self.end_collective)
        spawn = sys.modules["torch.multiprocessing.spawn"]
        wrap_method(spawn, "start_processes", self.note_spawn)
        mp.start_processes = spawn.start_processes

    def begin_hook(self, name):
        """Return the hook that runs before the collective `name`."""
        @never_raise
        def begin(*args, **kwargs):
            self.depth += 1
            self.names.add(name)
            arguments = [*args, *kwargs.values()]
            groups = [value for value in arguments if isinstance(value, dist.ProcessGroup)]
            is_world_group = all(group is dist.group.WORLD for group in groups)
            is_async = any(value is True for value in arguments[1:])  # async_op
            if "object" in name:  # True may be the object
                is_async = False
            if (self.depth > 1 or not is_world_group or is_async
                    or dist.get_world_size() != self.world_size):
                return
            self.number += 1
            self.current = name
            tensor = arguments[0] if arguments and name in EQUAL_SIZES else None
            size = f" of {tensor.numel()} numbers" if hasattr(tensor, "numel") else ""
            self.on_call(self.number, f"{name}{size}", self.place())

        return begin

    @never_raise
    def end_collective(self, *_, **__):
        self.depth -= 1
        if not self.depth:
            self.current = ""

    @never_raise
    def note_spawn(self, *_, **__):
        self.on_spawn(self.place())

    def place(self):
        return frames.places(sys._getframe(), self.script)[0]
