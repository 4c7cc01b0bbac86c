"""Counts what one rank keeps, sends and computes in its second optimizer step.

Works on real tensors and on fake ones, which have shapes without memory.
"""

import functools
import os
import re
import runpy
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.utils.flop_counter as flop_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

SENDING = re.compile("all-?reduce|all-?gather|reduce-scatter|all-?to-?all|broadcast|gather|"
                     "scatter|reduce|send")
SPELLING = {"allreduce": "all-reduce", "allgather": "all-gather", "alltoall": "all-to-all"}
OUTPUT_FIRST = {"all-gather", "reduce-scatter", "all-to-all", "gather", "scatter"}  # in c10d
NOT_SENDING = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor",
               "_wrap_tensor_autograd"}

aten = torch.ops.aten
FLOPS = flop_counter.flop_registry | {  # PyTorch has no rule for its attention on CPUs
    aten._scaled_dot_product_flash_attention_for_cpu:
        lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape),
    aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda g, q, k, v, *_, **__: flop_counter.sdpa_backward_flop_count(
            g.shape, q.shape, k.shape, v.shape)}


def ring_bytes(operation: str, size: int, ranks: int) -> int:
    """Return what each of n ranks sends in a collective to which it passes `size` bytes.

    Source: Patarasuk and Yuan, doi:10.1016/j.jpdc.2008.09.002, for rings. In a chain that reduces
    or broadcasts, one rank sends nothing: this is the mean over the ranks. A gather, scatter or
    send counts the bytes passed.
    """
    if operation == "all-reduce":
        return 2 * size * (ranks - 1) // ranks
    if operation == "all-gather":  # each rank passes its shard
        return size * (ranks - 1)
    if operation in ("reduce-scatter", "all-to-all", "reduce", "broadcast"):
        return size * (ranks - 1) // ranks
    return size if ranks > 1 else 0


@dataclass
class Storage:
    """Memory that tensors share."""
    bytes: int
    phase: str  # in which it was allocated
    device: str


@dataclass
class Segment:
    """What was counted from one call of an optimizer's step() to the next."""
    peak: Counter = field(default_factory=Counter)  # {device type: bytes}
    saved_at_peak: Counter = field(default_factory=Counter)
    activations: int = 0  # highest number of bytes that autograd had saved at one time
    calls: Counter = field(default_factory=Counter)  # {(operation, name of the group): calls}
    sent: Counter = field(default_factory=Counter)  # the same, in bytes
    flops: Counter = field(default_factory=Counter)  # {"forward", "backward", "recomputation"}


class SavedTensor:
    """A tensor that autograd saves, and its storage; weakref.finalize reports its release."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # the tensor itself would keep its own graph alive
        self.storage = storage_of(tensor)


class Watch(TorchDispatchMode):
    """Context that counts storages, collectives and FLOPs of a script's first two steps.

    A storage gets its role by the phase in which it was allocated: set-up, forward, backward, or
    the optimizer's step. When every optimizer of the script has made its second step, the
    attribute `footprint` is set and end() is called.
    """

    def __init__(self, end: Callable[[], None], limit: int = 0):
        """limit: bytes above which MemoryError is raised (0: none)."""
        super().__init__()
        self.end, self.limit = end, limit
        self.phase, self.in_step, self.backwards = "set-up", False, 0
        self.storages = {}  # {identity: Storage}
        self.total, self.saved = Counter(), Counter()  # bytes now: {device type: bytes}
        self.references = Counter()  # {identity: times that autograd has saved it}
        self.resized = set()  # identities of storages that FSDP frees and allocates again
        self.communicated = set()  # identities of storages that were passed to a collective
        self.models, self.modules, self.meshes = [], [], []  # modules: those that run now
        self.updated = {}  # {id: tensor} that an optimizer updates
        self.gradients = set()  # identities, at the end of the last call of step()
        self.step_calls = {}  # {id of an optimizer: calls of step() in each of its steps}
        self.last_backward = {}  # {id of an optimizer: number of backwards before its last step}
        self.segments = [Segment()]
        self.is_counting = True  # collectives
        self.footprint = None

    def install(self):
        modules = torch.nn.modules.module
        modules.register_module_forward_pre_hook(self.before_forward)
        modules.register_module_forward_hook(self.after_forward, always_call=True)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        saved_tensors_hooks(self.save, lambda saved: saved.tensor).__enter__()
        torch.autograd.backward = self.around_backward(torch.autograd.backward)
        torch.autograd.grad = self.around_backward(torch.autograd.grad)
        resize, initialize = torch.UntypedStorage.resize_, without_modes(DeviceMesh.__init__)
        rebuild = dist.Reducer._rebuild_buckets

        def count_resize(storage, size):
            resize(storage, size)
            if storage._cdata in self.storages:
                self.resized.add(storage._cdata)
                self.note_storage(storage, self.storages[storage._cdata].device)
            return storage

        def rebuild_buckets(reducer):
            self.is_counting = False  # DDP broadcasts their order, once
            try:
                return rebuild(reducer)
            finally:
                self.is_counting = True

        def note_mesh(mesh, *args, **kwargs):
            initialize(mesh, *args, **kwargs)
            self.meshes.append(mesh)

        torch.UntypedStorage.resize_, DeviceMesh.__init__ = count_resize, note_mesh
        dist.Reducer._rebuild_buckets = rebuild_buckets
        replace_everywhere(dist.init_device_mesh, without_modes(dist.init_device_mesh))

    # The phases of a step.

    def before_forward(self, module, _):
        self.modules.append(module)
        if len(self.modules) > 1 or self.phase == "backward" or not torch.is_grad_enabled():
            return
        if not any(module is model for model in self.models):
            self.models.append(module)
        self.phase = "forward"

    def after_forward(self, *_):
        self.modules.pop()

    def around_backward(self, function):
        def backward(*args, **kwargs):
            if self.phase == "backward":  # within another one
                return function(*args, **kwargs)
            self.phase = "backward"
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = "step" if self.in_step else "between steps"
                self.backwards += 1
        return backward

    def before_step(self, optimizer, *_):
        self.phase, self.in_step = "step", True  # some call forward and backward within step()

    def after_step(self, optimizer, *_):
        self.in_step = False
        self.phase = "between steps" if self.backwards else "set-up"
        parameters = [parameter for group in optimizer.param_groups
                      for parameter in group["params"]]
        self.updated |= {id(parameter): parameter for parameter in parameters}
        self.gradients = {storage_of(tensor.grad)._cdata for tensor in
                          [*self.updated.values(), *self.parameters()] if tensor.grad is not None}
        if not self.backwards:  # DeepSpeed creates Adam's state by a step without gradients
            return
        calls = self.step_calls.setdefault(id(optimizer), [])
        if self.last_backward.get(id(optimizer)) != self.backwards:
            calls.append(0)  # the first call of a step; DeepSpeed may make several
        self.last_backward[id(optimizer)] = self.backwards
        calls[-1] += 1
        if all(len(calls) > 1 and calls[1] >= calls[0] for calls in self.step_calls.values()):
            self.footprint = self.count()
            self.end()
        self.segments.append(Segment())
        self.update_peak()

    # Memory.

    def note_storage(self, storage, device):
        """device: type of the tensor's device (the storage of a fake tensor is on "meta")."""
        identity, size = storage._cdata, storage.nbytes()
        if device == "meta":
            return
        if identity not in self.storages:
            self.storages[identity] = Storage(0, self.phase, device)
            weakref.finalize(storage, self.forget, identity)
        self.total[device] += size - self.storages[identity].bytes
        self.storages[identity].bytes = size
        self.update_peak()
        if self.limit and self.total["cpu"] > self.limit:
            raise MemoryError(f"above {self.limit:,} bytes, half of this computer's free memory")

    def forget(self, identity):
        storage = self.storages.pop(identity)
        self.total[storage.device] -= storage.bytes
        self.resized.discard(identity)
        self.communicated.discard(identity)

    def update_peak(self):
        segment = self.segments[-1]
        for device, size in self.total.items():
            if size > segment.peak[device]:
                segment.peak[device] = size
                segment.saved_at_peak[device] = self.saved[device]

    def save(self, tensor):
        """Count a tensor that autograd keeps for backward, unless it is a parameter."""
        saved = SavedTensor(tensor)
        identity, size, device = saved.storage._cdata, saved.storage.nbytes(), device_of(tensor)
        is_parameter = self.modules and any(
            storage_of(parameter)._cdata == identity for parameter in
            self.modules[-1].parameters())  # perhaps gathered for this module alone
        is_from_set_up = (identity in self.storages
                          and self.storages[identity].phase == "set-up")
        if self.phase == "forward" and not is_parameter and not is_from_set_up:
            if not self.references[identity]:
                self.saved[device] += size
            self.references[identity] += 1
            weakref.finalize(saved, self.release, identity, size, device)
            segment = self.segments[-1]
            segment.activations = max(segment.activations, sum(self.saved.values()))
        return saved

    def release(self, identity, size, device):
        self.references[identity] -= 1
        if not self.references[identity]:
            del self.references[identity]
            self.saved[device] -= size

    def parameters(self):
        """Return the models' parameters; of a parameter that DeepSpeed has sharded, the shard."""
        return [getattr(parameter, "ds_tensor", parameter) for model in self.models
                for parameter in model.parameters()]

    def count(self) -> dict:
        """Return bytes by role, bytes sent, and FLOPs of the last step, as the README has them."""
        first_calls = sum(calls[0] for calls in self.step_calls.values())
        step = self.segments[-first_calls:]  # one call of each optimizer
        device = next((name for name in self.total if name not in ("cpu", "meta")), "cpu")
        roles, counted = {}, set()

        def add(role, identities):
            sizes = {identity: self.storages[identity].bytes for identity in identities
                     if identity in self.storages and identity not in counted
                     and self.storages[identity].device == device}
            counted.update(sizes)
            roles[role] = sum(sizes.values())

        def allocated(phase):
            return [identity for identity, storage in self.storages.items()
                    if storage.phase == phase and identity not in self.resized]

        add("parameters", (storage_of(parameter)._cdata for parameter in self.parameters()))
        add("gradients", self.gradients)
        add("master copy", (storage_of(tensor)._cdata for tensor in self.updated.values()))
        add("optimizer state", allocated("step"))
        add("communication buffers", self.communicated.intersection(
            [*allocated("set-up"), *allocated("forward")]))
        add("other, from the set-up", allocated("set-up"))
        highest = max(step, key=lambda segment: segment.peak[device])
        kept = sum(roles.values()) - roles["gradients"]
        roles["activations"] = max(segment.activations for segment in step)
        roles["rest of the peak"] = (highest.peak[device] - kept - highest.saved_at_peak[device])
        roles["peak"] = highest.peak[device]
        calls = sum((segment.calls for segment in step), Counter())
        sent = sum((segment.sent for segment in step), Counter())
        dimensions = {mesh.get_group(name).group_name: name for mesh in self.meshes
                      for name in mesh.mesh_dim_names or ()}
        collectives = [
            {"operation": operation, "dimension": dimensions.get(group, ""),
             "ranks": dist.get_process_group_ranks(
                 dist.distributed_c10d._resolve_process_group(group)),
             "calls": number, "bytes": sent[operation, group]}
            for (operation, group), number in sorted(calls.items())]
        return {"device": device, "memory": roles, "sent": collectives,
                "flops": dict(sum((segment.flops for segment in step), Counter()))}

    # Collectives and FLOPs.

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operations on local tensors, counted here
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        leaves = tree_leaves(result)
        if operation.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self.note_collective(operation, args)
            leaves += tree_leaves(args)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                self.note_storage(leaf.untyped_storage(), device_of(leaf))
        rule = FLOPS.get(operation._overloadpacket)
        if rule:
            phase = self.phase
            if phase == "backward" and torch.is_grad_enabled():
                phase = "recomputation"
            self.segments[-1].flops[phase] += rule(*args, **kwargs, out_val=result)
        return result

    def note_collective(self, operation, args):
        name = operation.__name__.partition(".")[0]
        if name in NOT_SENDING or not self.is_counting:
            return
        kind = SENDING.search(name.replace("_", "-"))[0]
        kind = SPELLING.get(kind, kind)
        self.communicated.update(leaf.untyped_storage()._cdata for leaf in tree_leaves(args)
                                 if isinstance(leaf, torch.Tensor))
        group = group_name(operation, args)
        ranks = dist.get_world_size(dist.distributed_c10d._resolve_process_group(group))
        is_second = operation.namespace == "c10d" and kind in OUTPUT_FIRST
        size = sum(leaf.nbytes for leaf in tree_leaves(args[is_second])
                   if isinstance(leaf, torch.Tensor))
        self.segments[-1].calls[kind, group] += 1
        self.segments[-1].sent[kind, group] += ring_bytes(kind, size, ranks)


def run_script(args, modes: list) -> str:
    """Run the script under the modes. Return why this returns: its second step should end it."""
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.script)))
    try:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            runpy.run_path(args.script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    return (f"{args.script} ended before its second optimizer step: give it more steps (or it does "
            "not use torch.optim, or not in this process)")


def without_modes(function):
    """Return a function whose tensors are real and not counted: a mesh reads its own ranks."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)
    return call


def replace_everywhere(original, function):
    """Replace a function in each module that has imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(original.__name__) is original:
            setattr(module, original.__name__, function)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the memory of a tensor, or of this rank's shard of it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(local, "elem", local).untyped_storage()  # elem: of an AsyncCollectiveTensor


def device_of(tensor: torch.Tensor) -> str:
    """Return the type of a tensor's device; quickly, also of a fake tensor, whose storage lies."""
    return (getattr(tensor, "fake_device", None) or tensor.device).type


def group_name(operation, args) -> str:
    """Return the name of the process group among an operation's arguments."""
    for parameter, value in zip(operation._schema.arguments, args):
        if parameter.name == "group_name" and isinstance(value, str):
            return value
        if parameter.name in ("group_name", "process_group"):
            return dist.ProcessGroup.unbox(value).group_name
    raise TypeError(f"{operation} has no process group")
