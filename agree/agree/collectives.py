"""Records the collectives that a rank calls, and compares them with the other ranks' first."""

import functools
import sys
import threading
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import frames
from .hooks import never_raise
from .internals import COLLECTIVES, SPAWN, patch

WITHOUT_SIZE = (  # whose first tensors may differ in size among ranks
    "reduce_scatter", "gather", "scatter", "all_to_all", "all_to_all_single")
SHORT_WAIT = 1  # seconds for the others before an asynchronous collective, which need not wait


class Collectives:
    """Hooks that call on_call(number, call, place, seconds) before collectives of all ranks.

    on_call() waits until all ranks are there, at most `seconds`, and returns whether they were.
    """

    def __init__(self, script: str, world_size: int, seconds: float, on_call: Callable,
                 on_spawn: Callable[[str], None]):
        self.script, self.world_size, self.seconds = script, world_size, seconds
        self.on_call, self.on_spawn = on_call, on_spawn
        self.depth = threading.local()  # nesting level
        self.number = 0  # collectives of all ranks so far
        self.late = set()  # lengths of waits that were too short: no more waits of this length
        self.names = set()  # of the collectives called
        self.current = ""  # the collective in progress, also one that DDP calls in C++

    def install(self):
        for name in filter(functools.partial(hasattr, distributed_c10d), COLLECTIVES):
            patch(f"torch.distributed.distributed_c10d:{name}", self.begin_hook(name),
                  self.end_collective)
        patch(SPAWN, self.note_spawn)

    def begin_hook(self, name):
        """Return the hook that runs before the collective `name`."""
        @never_raise
        def begin(*args, **kwargs):
            self.depth.level = getattr(self.depth, "level", 0) + 1
            self.names.add(name)
            arguments = [*args, *kwargs.values()]
            groups = [value for value in arguments if isinstance(value, dist.ProcessGroup)]
            is_outside = any(value is dist.GroupMember.NON_GROUP_MEMBER for value in arguments)
            if self.depth.level > 1 or is_outside or any(
                    group.size() < dist.get_world_size() for group in groups):
                return
            is_async = any(value is True for value in arguments[1:]) and "object" not in name
            first = kwargs.get("tensor", arguments[0] if arguments else ())
            tensors = first if isinstance(first, (list, tuple)) else [first]
            sizes = [tensor.numel() for tensor in tensors if hasattr(tensor, "numel")]
            size = f" of {sum(sizes)} numbers" if sizes and name not in WITHOUT_SIZE else ""
            self.compare(f"{name}{size}", frames.place(sys._getframe(), self.script),
                         SHORT_WAIT if is_async else self.seconds)

        return begin

    def compare(self, call, place, seconds=None):
        """Compare this rank's next collective with those of the others."""
        seconds = seconds or self.seconds
        if dist.get_world_size() == self.world_size:
            self.number += 1
            self.current = call
            if not self.on_call(self.number, call, place, 0 if seconds in self.late else seconds):
                self.late.add(seconds)

    @never_raise
    def end_collective(self, *_, **__):
        self.depth.level -= 1
        self.end()

    def end(self):
        if not getattr(self.depth, "level", 0):
            self.current = ""

    @never_raise
    def note_spawn(self, *_, **__):
        self.on_spawn(frames.place(sys._getframe(), self.script))
