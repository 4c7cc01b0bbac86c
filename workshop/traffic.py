"""Count the bytes that a rank sends with torch.distributed, by operation and process group."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SENDS = {  # for each operation that sends: its name, and the index of the argument it sends
    "allreduce_": ("all-reduce", 0), "all_reduce": ("all-reduce", 0), "send": ("send", 0),
    "broadcast_": ("broadcast", 0), "scatter_": ("scatter", 1), "allgather_": ("all-gather", 1),
    "_allgather_base_": ("all-gather", 1), "all_gather_into_tensor": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1), "reduce_scatter_tensor": ("reduce-scatter", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1)}
NOT_SENDING = ("recv_", "wait_tensor", "_wrap_tensor_autograd")


class CommunicationCounter(TorchDispatchMode):
    """Context that records each torch.distributed operation in `calls`, as [operation, bytes].

    bytes: of the tensors that this rank passes to the operation. `groups` has the name of each
    call's process group. Raises KeyError for an unknown operation, so that none is missed.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.groups = [], []

    def start(self):
        """Count from here to stop(); for a context, use `with`."""
        self.__enter__()

    def stop(self):
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor then calls operations on local tensors, counted here
        name = operation.__name__.partition(".")[0]
        if operation.namespace in ("c10d", "_c10d_functional") and name not in NOT_SENDING:
            kind, index = SENDS[name]
            self.calls.append([kind, sum(leaf.nbytes for leaf in tree_leaves(args[index]))])
            self.groups.append(group_name(operation, args))
        return operation(*args, **(kwargs or {}))

    def print_bytes(self, mesh: DeviceMesh) -> dict[str, tuple[int, int]]:
        """Return {dimension of a named mesh: ring_bytes() of its group}; rank 0 prints them."""
        sent = {name: self.ring_bytes(mesh.get_group(name)) for name in mesh.mesh_dim_names}
        if dist.get_rank() == 0:
            text = ", ".join(f"{name} dimension: {size:,} in {calls} calls"
                             for name, (size, calls) in sent.items())
            print(f"bytes that a rank sends per step: {text}", flush=True)
        return sent

    def ring_bytes(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """Return the bytes that this rank sends in this group, and the number of its calls.

        Of a tensor of S bytes, each of n ranks sends (n - 1) / n S in a ring's all-gather or
        reduce-scatter, and twice that in its all-reduce (Patarasuk and Yuan,
        doi:10.1016/j.jpdc.2008.09.002). In an all-gather a rank passes S / n to the operation.
        """
        ranks = dist.get_world_size(group)
        factors = {"all-gather": ranks, "reduce-scatter": 1, "all-reduce": 2}
        sizes = [factors[operation] * size * (ranks - 1) // ranks
                 for (operation, size), name in zip(self.calls, self.groups)
                 if name == group.group_name]
        return sum(sizes), len(sizes)


def group_name(operation, args):
    """Return the name of the process group among an operation's arguments."""
    for parameter, value in zip(operation._schema.arguments, args):
        if parameter.name == "group_name" and isinstance(value, str):
            return value
        if parameter.name in ("group_name", "process_group"):
            return dist.ProcessGroup.unbox(value).group_name
    raise TypeError(f"{operation} has no process group")
