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
        self.before_sharding = {}  # {name: [part, checksum] of what fully_shard() got}
        self.is_installed = False

    def install(self):
        wrap_method(torch._C, "_log_api_usage_once", self.note_api)

    @never_raise
    def note_api(self, name, *_):
        """Record what FSDP2 shards, from the first call of fully_shard() on."""
        if name == "torch.distributed.fsdp.fully_shard" and not self.is_installed:
            self.is_installed = True
            from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
            wrap_method(FSDPParam, "__init__", self.note_whole, self.note_shard)

    @never_raise
    def note_whole(self, managed, parameter, *_, **__):
        if parameter.device.type != "meta":
            managed.agree_whole = part_of(parameter), state_of(parameter)[0]

    @never_raise
    def note_shard(self, _, managed, *__, **___):
        if hasattr(managed, "agree_whole"):
            managed.agree_shard = state_of(managed.sharded_param)

    def note_first_state(self, names):
        """Keep what fully_shard() got if nothing has overwritten the shards since then."""
        for parameter, name in names.items():
            managed = self.managed.get(parameter)
            if hasattr(managed, "agree_shard"):
                if managed.agree_shard == state_of(parameter):
                    self.before_sharding[name] = managed.agree_whole
                del managed.agree_shard  # compared once, in the first backward pass

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
                managed.agree_offset = offset_of_shard(gradient.shape, managed.mesh_info.mesh)
                note_gradient(managed.sharded_param, gradient)

        wrap_method(_fsdp_param_group, "foreach_reduce", before_reduction)

    def offset_of(self, parameter) -> int:
        """Return where FSDP2's shard of a gradient begins in what it was averaged with."""
        return getattr(self.managed.get(parameter), "agree_offset", 0)


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
