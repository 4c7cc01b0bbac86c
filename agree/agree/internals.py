"""What agree needs of PyTorch's internals, which another version may not have.

check() compares the installed PyTorch with the table. The findings of a row that does not hold are
not judged, and a line says so. patch() replaces a function of the table, and nothing else does.
"""

import functools
import inspect
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed.fsdp

from .hooks import wrap

ALL, DATA, SEQUENCE, FSDP2 = "all", "what DataLoaders draw", "different collectives", "FSDP2"


class Internal(NamedTuple):
    """A name as pkgutil.resolve_name() takes it, and what agree expects of it."""

    name: str
    expected: str  # its first parameters, or .attributes of a class's instances
    findings: str  # what is not available without it; if all, agree refuses
    purpose: str


DATA_LOADER_ITERATOR = "torch.utils.data.dataloader:_BaseDataLoaderIter"
FSDP_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
FSDP_REDUCTION = "torch.distributed.fsdp._fully_shard._fsdp_param_group:foreach_reduce"
SHARD_OF_TENSOR = "torch.distributed.tensor._utils:compute_local_shape_and_global_offset"
DDP = "torch.nn.parallel:DistributedDataParallel"
SPAWN = "torch.multiprocessing.spawn:start_processes"
NEW_COLLECTIVES = "all_gather_single", "reduce_scatter_single"  # older versions lack them
COLLECTIVES = {  # {function: its first parameter}
    "all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor", "all_gather_single": "output_tensor",
    "reduce_scatter": "output", "reduce_scatter_tensor": "output",
    "reduce_scatter_single": "output", "gather": "tensor", "scatter": "tensor",
    "all_to_all": "output_tensor_list", "all_to_all_single": "output", "barrier": "group",
    "monitored_barrier": "group", "all_gather_object": "object_list", "gather_object": "obj",
    "broadcast_object_list": "object_list", "scatter_object_list": "scatter_object_output_list"}

DIVISION = torch.ones((), requires_grad=True).div(2).grad_fn  # a node of a loss's graph

INTERNALS = (
    # Replaced
    Internal("torch.autograd:backward", "tensors", ALL, "begin and end of Tensor.backward()"),
    Internal("torch.autograd:grad", "outputs inputs", ALL, "the same without .grad"),
    Internal(f"{DATA_LOADER_ITERATOR}.__init__", "self loader", DATA, "an epoch begins"),
    Internal(f"{DATA_LOADER_ITERATOR}._reset", "self loader first_iter", DATA,
             "a further epoch of persistent workers begins"),
    Internal(f"{DATA_LOADER_ITERATOR}._next_index", "self", DATA, "returns a batch's indices"),
    Internal(f"{DATA_LOADER_ITERATOR}.__next__", "self", DATA, "returns a batch"),
    Internal("torch.utils.data:DistributedSampler.set_epoch", "self epoch", DATA, "was it called?"),
    Internal(f"{FSDP_PARAMETER}.__init__", "self param", FSDP2,
             "gets a whole parameter, and keeps this rank's shard"),
    Internal(FSDP_REDUCTION, "fsdp_params unsharded_grads", FSDP2,
             "gets a rank's own gradients, before they are averaged"),
    Internal(SPAWN, "fn args nprocs", ALL, "a script starts ranks, which agree refuses"),
    *(Internal(f"torch.distributed.distributed_c10d:{name}", first, SEQUENCE, "a collective begins")
      for name, first in COLLECTIVES.items()
      if name not in NEW_COLLECTIVES or hasattr(torch.distributed.distributed_c10d, name)),
    # Only used
    Internal(DATA_LOADER_ITERATOR, "._base_seed", DATA, "the seed of its workers"),
    Internal(FSDP_PARAMETER, ".sharded_param ._unsharded_param", FSDP2, "the two states"),
    Internal("torch.distributed.fsdp._fully_shard._fsdp_common:DataParallelMeshInfo", ".mesh",
             FSDP2, "the ranks among which FSDPParam.mesh_info divides a parameter"),
    Internal(SHARD_OF_TENSOR, "global_shape mesh placements", FSDP2, "the part that a rank has"),
    Internal(DDP, ".require_backward_grad_sync", SEQUENCE, "backward() communicates"),
    Internal(f"{DDP}.will_sync_module_buffers", "self", SEQUENCE, "forward() communicates"),
    Internal(f"{DDP}._get_ddp_logging_data", "self", ALL, "names DDP's hook, such as PowerSGD"),
    Internal("torch.nn.modules.batchnorm:_NormBase", ".track_running_stats", ALL,
             "statistics, which may differ by rank"),
    Internal("torch.nn.modules.dropout:_DropoutNd", ".p", ALL, "draws random numbers"),
    Internal("torch.nn.parameter:UninitializedTensorMixin", "", ALL, "lazy layers' parameters"),
    Internal("torch.nn:Module", "._buffers ._parameters ._non_persistent_buffers_set", ALL,
             "the names of tensors that are not trained"),
    Internal("torch:Tensor._version", "", ALL, "grows if a gradient is changed in place"),
    Internal("agree.internals:DIVISION._saved_other", "", ALL, "the number that divides a loss"))


@functools.cache
def check() -> dict[str, str]:
    """Return {findings that are not available: why}; raise RuntimeError if none is."""
    problems = {}
    for internal in INTERNALS:
        if not is_as_expected(internal):
            name, expected = internal.name.replace(":", "."), ", ".join(internal.expected.split())
            problems.setdefault(internal.findings, (
                f"torch {torch.__version__} has no {name}{expected and f' ({expected})'}, which "
                "agree needs: use a version that agree's README names"))
    if ALL in problems:
        raise RuntimeError(problems[ALL])
    return problems


def is_as_expected(internal):
    names = internal.expected.split()
    try:
        owner = pkgutil.resolve_name(internal.name)
        if internal.expected.startswith("."):
            attributes = {*inspect.get_annotations(owner), *owner.__init__.__code__.co_names}
            return all(name[1:] in attributes for name in names)
        return not names or list(inspect.signature(owner).parameters)[:len(names)] == names
    except (ImportError, AttributeError, TypeError, ValueError):
        return False


def patch(name: str, before: Callable | None = None, after: Callable | None = None) -> None:
    """Let a function of the table call before(*args) first, and after(result, *args) at the end.

    It stays as it is if its findings are not available.
    """
    internal = next(internal for internal in INTERNALS if internal.name == name)
    if internal.findings in check():
        return
    module, _, path = name.partition(":")
    path, _, attribute = path.rpartition(".")
    original = pkgutil.resolve_name(name)
    call = wrap(original, before, after)
    for owner in f"{module}:{path}", "torch.distributed", "torch.multiprocessing":
        place = pkgutil.resolve_name(owner)
        if getattr(place, attribute, None) is original:  # the last two export others' functions
            setattr(place, attribute, call)
