"""Knows which part of each parameter a rank has, under FSDP2 and DeepSpeed ZeRO 3."""

import os
import socket

import torch

from .fingerprints import state_of
from .hooks import never_raise, wrap_method


class Sharding:
    """Names the parts, and records what fully_shard() takes them from, and whole gradients."""

    def __init__(self):
        self.parts = {}  # {name of a parameter: which part of it this rank has, "" for the whole}
        self.managed = {}  # {parameter: what FSDP2 knows of it}
        self.wholes = {}  # {what FSDP2 knows: (part, checksum) of what fully_shard() got}
        self.shards = {}  # {what FSDP2 knows: the shard's state}, until the first backward pass
        self.before_sharding = {}  # {name: what fully_shard() got}
        self.offsets = {}  # {parameter: where FSDP2's shard begins in the whole gradient}
        self.is_installed = False

    def install(self):
        wrap_method(torch._C, "_log_api_usage_once", self.note_api)

    @never_raise
    def note_api(self, name, *_):
        """Record what FSDP2 shards, from the first call of fully_shard() on, which it logs.

        A hook from the start would import FSDP2, which takes seconds, in every script.
        """
        if name == "torch.distributed.fsdp.fully_shard" and not self.is_installed:
            self.is_installed = True
            from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
            wrap_method(FSDPParam, "__init__", self.note_whole, self.note_shard)

    @never_raise
    def note_whole(self, managed, parameter, *_, **__):
        if parameter.device.type != "meta":
            self.wholes[managed] = part_of(parameter), state_of(parameter)[0]

    @never_raise
    def note_shard(self, _, managed, *__, **___):
        if managed in self.wholes:
            self.shards[managed] = state_of(managed.sharded_param)

    def note_first_state(self, names):
        """Keep what fully_shard() got if nothing has overwritten the shards since then."""
        for parameter, name in names.items():
            managed = self.managed.get(parameter)
            if managed in self.shards and self.shards.pop(managed) == state_of(parameter):
                self.before_sharding[name] = self.wholes[managed]

    def parameters_of(self, module):
        """Return [(name, parameter)], with its shard for a parameter that FSDP2 has gathered."""
        shards = {}
        for part in module.modules():
            group = part._get_fsdp_state()._fsdp_param_group if is_fsdp2(part) else None
            for managed in group.fsdp_params if group else []:
                shards[id(getattr(managed, "_unsharded_param", None))] = managed.sharded_param
                self.managed[managed.sharded_param] = managed
        return [(name, shards.get(id(parameter), parameter))
                for name, parameter in module.named_parameters()]

    def is_divided_otherwise(self, parameter) -> bool:
        """Return True if something other than FSDP2 shards a parameter: tensor parallelism."""
        managed = self.managed.get(parameter)
        data_dimensions = managed.mesh_info.mesh.ndim if managed else 0
        return hasattr(parameter, "to_local") and parameter.device_mesh.ndim > data_dimensions

    def hook_reduction(self, note_gradient):
        """Call note_gradient(shard, whole gradient) before FSDP2 averages and shards it."""
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group

        @never_raise
        def before_reduction(parameters, gradients, *_, **__):
            for managed, gradient in zip(parameters, gradients):
                shard = managed.sharded_param
                self.offsets[shard] = offset_of_shard(gradient.shape, managed.mesh_info.mesh)
                note_gradient(shard, gradient)

        wrap_method(_fsdp_param_group, "foreach_reduce", before_reduction)


def is_fsdp2(module) -> bool:
    return type(module).__name__.startswith("FSDP") and hasattr(module, "_get_fsdp_state")


def part_of(tensor: torch.Tensor) -> str:
    """Return which part of a tensor this rank has, as text, or "" for the whole."""
    if hasattr(tensor, "ds_tensor"):
        return f"of process {os.getpid()} on {socket.gethostname()}"
    if not hasattr(tensor, "to_local"):
        return ""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    shape, indices = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements)
    return "" if shape == tensor.shape else f"{tuple(shape)} at {tuple(indices)}"


def offset_of_shard(shape: torch.Size, mesh) -> int:
    """Return the offset of this rank's shard of a tensor that FSDP2 shards over a mesh."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    _, indices = compute_local_shape_and_global_offset(shape, mesh, placements)
    return indices[0] * shape[1:].numel()
