"""Knows which part of each parameter a rank has under FSDP2."""

import pkgutil
from collections.abc import Callable

import torch
from torch.distributed.tensor import Replicate, Shard

from .fingerprints import state_of
from .hooks import never_raise
from .internals import FSDP_PARAMETER, FSDP_REDUCTION, SHARD_OF_TENSOR, patch


class Sharding:
    """Names the parts, and records what fully_shard() takes them from, and whole gradients."""

    def __init__(self):
        self.parts = {}  # {name of a parameter: which part of it this rank has, "" for the whole}
        self.wholes = {}  # {FSDPParam: (part, checksum) of what fully_shard() got, None on meta}
        self.first_shards = {}  # {FSDPParam: the shard's state}, until the first backward pass
        self.managed = {}  # {shard: its FSDPParam}
        self.before_sharding = {}  # {name: what fully_shard() got}
        self.offsets = {}  # {shard: where it begins in the whole gradient}

    def install(self, note_gradient: Callable):
        """Install the hooks; note_gradient: called with a shard and this rank's whole gradient."""
        self.note_gradient = note_gradient
        patch(f"{FSDP_PARAMETER}.__init__", self.note_whole, self.note_shard)
        patch(FSDP_REDUCTION, self.before_reduction)

    @never_raise
    def note_whole(self, managed, parameter, *_, **__):
        is_meta = parameter.device.type == "meta"
        self.wholes[managed] = None if is_meta else (part_of(parameter), state_of(parameter)[0])

    @never_raise
    def note_shard(self, _, managed, *__, **___):
        if self.wholes[managed]:
            self.first_shards[managed] = state_of(managed.sharded_param)

    @never_raise
    def before_reduction(self, all_managed, gradients, *_, **__):
        for managed, gradient in zip(all_managed, gradients):
            shard, mesh = managed.sharded_param, managed.mesh_info.mesh
            placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
            _, indices = shape_and_offset(gradient.shape, mesh, placements)
            self.offsets[shard] = indices[0] * gradient.shape[1:].numel()
            self.note_gradient(shard, gradient)

    def note_first_state(self, names):
        """Keep what fully_shard() got if nothing has overwritten the shards since then."""
        for parameter, name in names.items():
            managed = self.managed.get(parameter)
            if managed in self.first_shards and (
                    self.first_shards.pop(managed) == state_of(parameter)):
                self.before_sharding[name] = self.wholes[managed]

    def parameters_of(self, module):
        """Return [(name, parameter)], with its shard for a parameter that FSDP2 has gathered."""
        shards = {}
        for managed in self.wholes:
            shards[id(getattr(managed, "_unsharded_param", None))] = managed.sharded_param
            self.managed[managed.sharded_param] = managed
        return [(name, shards.get(id(parameter), parameter))
                for name, parameter in module.named_parameters()]

    def is_divided_otherwise(self, parameter) -> bool:
        """Return True if something other than FSDP2 shards a parameter: tensor parallelism."""
        managed = self.managed.get(parameter)
        data_dimensions = managed.mesh_info.mesh.ndim if managed else 0
        return hasattr(parameter, "to_local") and parameter.device_mesh.ndim > data_dimensions


def shape_and_offset(*whole):
    """Return shape and offset of this rank's part of a tensor: (shape, mesh, placements)."""
    return pkgutil.resolve_name(SHARD_OF_TENSOR)(*whole)


def part_of(tensor: torch.Tensor) -> str:
    """Return which part of a tensor this rank has, as text, or "" for the whole."""
    if not hasattr(tensor, "to_local"):
        return ""
    shape, indices = shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return "" if shape == tensor.shape else f"{tuple(shape)} at {tuple(indices)}"
