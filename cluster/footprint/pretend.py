"""Makes this process one rank of a job that does not exist: its collectives return at once.

PyTorch's "fake" process group sends nothing. Real tensors then keep the values that they had; fake
tensors have shapes and no values.
"""

import functools
import os
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import _utils
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from cluster.footprint.watch import replace_everywhere, without_modes

# What autocast computes in fp32 on a GPU, and not on a CPU (PyTorch, "CUDA Ops that can autocast to
# float32"; losses, which have one number, are left out)
FP32_ON_GPUS = ("layer_norm", "group_norm", "softmax", "log_softmax", "pow", "exp", "log", "rsqrt",
                "reciprocal", "softplus", "sum", "cumsum", "norm")
AUTOCAST = torch.library.Library("aten", "IMPL", "AutocastCPU")
MOST_ANSWERS = 100_000  # an evaluation before the first step may read some 10,000


def set_variables(rank: int, ranks: int, gpus_per_node: int):
    """Set torchrun's variables, for one rank of a job."""
    per_node = min(ranks, gpus_per_node)
    values = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % per_node,
              "LOCAL_WORLD_SIZE": per_node, "GROUP_RANK": rank // per_node,
              "GROUP_WORLD_SIZE": ranks // per_node, "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "footprint"}
    if not torch.cuda.is_available():
        values["ACCELERATE_USE_CPU"] = "true"  # else accelerate ignores the ranks
    os.environ.update({name: str(value) for name, value in values.items()})


def pretend_group(rank: int, ranks: int):
    """Let init_process_group() connect to nobody; every rank's objects are this rank's."""
    init_process_group, new_group = dist.init_process_group, dist.new_group

    def init_fake_group(backend=None, *_, **__):
        if not dist.is_initialized():
            init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
            dist.get_backend = lambda *_: backend or "gloo"  # some scripts compare it

    def new_fake_group(ranks=None, **kwargs):
        return new_group(ranks, group_desc=kwargs.get("group_desc"))

    def all_gather_object(objects, value, *_, **__):
        objects[:] = [value] * len(objects)

    def broadcast_object_list(*_, **__):
        pass

    replace_everywhere(init_process_group, init_fake_group)
    replace_everywhere(new_group, new_fake_group)
    replace_everywhere(dist.all_gather_object, all_gather_object)
    replace_everywhere(dist.broadcast_object_list, broadcast_object_list)


def average_by_hook(fake: bool):
    """Let DDP all-reduce by a hook: its C++ code waits for tensors that the fake group lacks.

    fake: DDP's tensors are fake. It then keeps its first bucket of all gradients, because making
    its final buckets reads values; the hook divides it as those would.
    """
    initialize = DistributedDataParallel.__init__

    @functools.wraps(initialize)
    def with_hook(ddp, *args, **kwargs):
        initialize(ddp, *args, **kwargs | ({"init_sync": False} if fake else {}))

        def average(_, bucket):
            buffer, future = bucket.buffer(), Future()
            parts = [buffer]
            if fake and not ddp.find_unused_parameters:
                sizes = [gradient.numel() for gradient in bucket.gradients()]
                parts = buffer.split(bucket_sizes(sizes, buffer.element_size(),
                                                  ddp.bucket_bytes_cap))
            for part in parts:
                dist.all_reduce(part)
            future.set_result(buffer)
            return future

        ddp.register_comm_hook(None, average)

    DistributedDataParallel.__init__ = with_hook
    if fake:
        dist.Reducer._rebuild_buckets = lambda _: False


def compute_as_on_a_gpu():
    """Let this process's CPU use the algorithms that keep as much memory as a GPU's defaults.

    Optimizers update all parameters at once (foreach), dropout keeps a mask of one byte per
    element, and attention with dropout keeps no matrix of all pairs of tokens.
    """
    attention, dropout = F.scaled_dot_product_attention, F.dropout
    foreach_devices = _foreach_utils._get_foreach_kernels_supported_devices

    def attend_without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    def drop_by_mask(input, p=0.5, training=True, inplace=False):
        if inplace or not training or not 0 < p < 1:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, training)[0]

    F.scaled_dot_product_attention, F.dropout = attend_without_dropout, drop_by_mask
    replace_everywhere(foreach_devices, lambda: [*foreach_devices(), "cpu"])
    for types in optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types:
        types.append(FakeTensor)
    for name in FP32_ON_GPUS:
        for overload in getattr(torch.ops.aten, name).overloads():
            compute_in_fp32(getattr(getattr(torch.ops.aten, name), overload))


def compute_in_fp32(operation):
    """Let autocast on the CPU give this operation fp32."""
    def operate(*args, **kwargs):
        args = [arg.float() if isinstance(arg, torch.Tensor) and arg.is_floating_point()
                and arg.dtype != torch.float64 else arg for arg in args]
        with torch.autocast("cpu", enabled=False):
            return operation(*args, **kwargs)

    name = operation._schema.name + ("." + operation._overloadname).removesuffix(".default")
    AUTOCAST.impl(name, operate)


def bucket_sizes(sizes: list[int], element_bytes: int, cap: int) -> list[int]:
    """Return the elements of DDP's buckets of gradients of these sizes, in the order of backward.

    A bucket is closed when it has reached its limit: 1 MiB for the first, `cap` bytes for others
    (PyTorch, torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size).
    """
    limit, buckets = dist._DEFAULT_FIRST_BUCKET_BYTES, [0]
    for size in sizes:
        if buckets[-1] * element_bytes >= limit:
            limit = cap
            buckets.append(0)
        buckets[-1] += size
    return buckets


class Scalars(TorchDispatchMode):
    """Answers item() and bool() of a fake tensor: with its value if it is a constant, else with 1.

    With False for bool and 0 for uint8, which is what tells that a gradient is infinite. Vectors of
    random integers are real tensors, because a script reads them, one by one, as indices.
    """

    def __init__(self):
        super().__init__()
        self.answers, self.place = 0, ""  # place: the first line that asked for a value

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            return self.answer(args[0])
        size = next((arg for arg in args if isinstance(arg, list)), [])  # of random integers
        if (operation.overloadpacket is torch.ops.aten.randperm
                or (operation.overloadpacket is torch.ops.aten.randint and len(size) == 1)
                or (operation.is_view and is_real(args[0])
                    and operation is not torch.ops.aten.lift_fresh.default)):  # torch.tensor()
            with _disable_current_modes():
                return operation(*args, **(kwargs or {}))
        return operation(*args, **(kwargs or {}))

    def answer(self, tensor):
        if value_of(tensor) is not None:
            return value_of(tensor)
        self.answers += 1
        if self.answers == 1:
            self.place = next((f"{Path(frame.filename).name}:{frame.lineno}"
                               for frame in reversed(traceback.extract_stack())
                               if "site-packages" not in frame.filename
                               and Path(__file__).parent not in Path(frame.filename).parents), "")
        if self.answers == MOST_ANSWERS:
            raise RuntimeError(f"asks {MOST_ANSWERS:,} times for the values of tensors, and fake "
                               "ones have none: does a loop wait for a value?")
        if tensor.dtype in (torch.bool, torch.uint8):
            return 0
        return 1.0 if tensor.is_floating_point() else 1


def is_real(tensor):
    return type(tensor) in (torch.Tensor, nn.Parameter)


def value_of(tensor):
    """Return the number in a tensor, or None if it is fake and no constant."""
    constant = tensor if is_real(tensor) else getattr(tensor, "constant", None)
    if constant is None:
        return None
    with _disable_current_modes():
        return constant.item()


def index_of(tensor):
    """Replace Tensor.__index__: an index or a size that is not known would falsify the counts."""
    if value_of(tensor) is None:
        raise RuntimeError("a fake tensor, which has no value, is an index or a size")
    return int(value_of(tensor))


def fake_tensors() -> list[TorchDispatchMode]:
    """Return the modes under which all new tensors are fake."""
    _utils._compute_local_shape_and_global_offset = without_modes(  # it reads offsets
        _utils._compute_local_shape_and_global_offset)
    nn.Module._apply, torch.chunk = convert, chunk
    torch.Tensor.__format__ = lambda tensor, _: str(tensor)
    torch.Tensor.__index__ = index_of
    torch.amp.GradScaler._maybe_opt_step = (  # it would read that the gradients are infinite
        lambda scaler, optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs))
    return [FakeTensorMode(allow_non_fake_inputs=True), Scalars()]


def chunk(tensor, chunks, dim=0):
    """Replace torch.chunk, by which FSDP makes one view per rank: equal chunks are one view."""
    length = tensor.shape[dim]
    size = max(1, -(-length // chunks))
    last = tensor.narrow(dim, (length - 1) // size * size, length - (length - 1) // size * size)
    return (*[tensor.narrow(dim, 0, size)] * ((length - 1) // size), last)


@torch.no_grad()
def convert(module, function, recurse=True):
    """Replace nn.Module._apply, which cannot exchange a fake tensor: keep what does not change."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for tensors in module._parameters, module._buffers:
        for name, tensor in tensors.items():
            new = tensor if tensor is None else function(tensor)
            if new is None or (new.dtype, new.device.type) == (tensor.dtype, tensor.device.type):
                continue
            if tensors is module._parameters:
                new = nn.Parameter(new, tensor.requires_grad)
            tensors[name] = new
    return module
