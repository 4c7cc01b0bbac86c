"""Checksums and random projections of tensors: ranks compare these, not the tensors."""

import functools
import re
import zlib
from collections.abc import Iterator, Mapping

import torch

COLUMNS = 2**16  # random weights per projection; they repeat after that
PROJECTIONS = 3  # per tensor
DATASET_ENTRIES = 1000  # that dataset_checksum() reads of a list, array or tensor
LARGEST_BATCH = 10_000  # samples; a larger batch gets one checksum
MAX_DEPTH = 4  # levels of a batch's containers


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, dense.

    Raises ValueError if the memory has been freed, because reading it would crash.
    """
    if hasattr(tensor, "ds_tensor"):  # DeepSpeed ZeRO stage 3
        return tensor.ds_tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    freed = tensor.layout == torch.strided and not tensor.untyped_storage().nbytes()
    if freed and tensor.numel():
        raise ValueError("a tensor's memory has been freed")
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def shard_name(tensor: torch.Tensor) -> str:
    """Return which part of a tensor this rank has, as text, or "" for the whole."""
    if not hasattr(tensor, "to_local"):
        return ""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    shape, indices = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements)
    return "" if shape == tensor.shape else f"{tuple(shape)} at {tuple(indices)}"


def shard_offset(shape: torch.Size, mesh) -> int:
    """Return the offset of this rank's shard of a tensor that FSDP2 shards over a mesh."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    _, indices = compute_local_shape_and_global_offset(shape, mesh, placements)
    return indices[0] * shape[1:].numel()


def real_and_imaginary(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return {name: tensor}, or the real and imaginary parts of a complex tensor."""
    if not tensor.is_complex():
        return {name: tensor}
    tensor = local_part(tensor)
    return {f"{name}, real": tensor.real, f"{name}, imaginary": tensor.imag}


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of a dense tensor's bytes.

    The bytes are copied first, because FSDP cannot free a storage that NumPy has used.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return zlib.crc32(copy.view(-1).view(torch.uint8).numpy())


@functools.cache
def random_weights():
    generator = torch.Generator().manual_seed(0)  # the same on all ranks
    return torch.randn(COLUMNS, PROJECTIONS, generator=generator, dtype=torch.float64)


def projections(tensor: torch.Tensor, offset: int = 0) -> list[float]:
    """Return PROJECTIONS weighted sums of all elements, with the same random weights on all ranks.

    The sums are linear: the projections of a mean are the mean of the projections, and those of a
    whole tensor are the sum of its shards' projections. offset: a shard's in the whole tensor.
    """
    flat, before = local_part(tensor).reshape(-1), offset % COLUMNS
    if before + len(flat) > COLUMNS:
        flat, before = sum_columns(flat, before), 0
    weights = random_weights()[before:before + len(flat)]
    return (flat.cpu().double() @ weights).tolist()


def sum_columns(flat, before):
    """Return the sums of the elements that have the same weights, without a copy on the device."""
    first = -before % COLUMNS  # elements up to the first whole row
    rows = len(flat[first:]) // COLUMNS
    end = first + rows * COLUMNS
    sums = torch.zeros(COLUMNS, dtype=torch.float64)
    sums[COLUMNS - first:] += flat[:first].cpu()
    if rows:
        dtype = torch.float64 if has_float64(flat.device) else torch.float32
        sums += flat[first:end].view(rows, COLUMNS).sum(0, dtype=dtype).cpu()
    sums[:len(flat) - end] += flat[end:].cpu()
    return sums


def has_float64(device: torch.device) -> bool:
    """Return False for GPUs that cannot compute in float64: Apple's, and some of Intel's."""
    if device.type == "xpu":
        return getattr(torch.xpu.get_device_properties(device), "has_fp64", True)
    return device.type != "mps"


def gradient_projections(name: str, tensor: torch.Tensor, offset: int = 0
                         ) -> dict[str, list[float]]:
    """Return {name: projections} of a gradient, or of its real and imaginary parts."""
    return {part: projections(values, offset)
            for part, values in real_and_imaginary(name, tensor).items()}


def parameter_state(tensor: torch.Tensor) -> list[float]:
    """Return a parameter's checksum, followed by its projections."""
    local = local_part(tensor)
    real = torch.view_as_real(local) if local.is_complex() else local
    return [tensor_checksum(real), *projections(real)]


# Data.

def tensors_in(batch: object, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch: in lists, dicts, arrays, and objects that contain tensors.

    A list of numbers or texts becomes a tensor of their checksums.
    """
    if torch.is_tensor(batch):
        yield batch
    elif hasattr(batch, "__array_interface__"):
        yield torch.as_tensor(batch)
    elif depth < MAX_DEPTH and not isinstance(batch, (str, bytes, torch.nn.Module)):
        if hasattr(batch, "to_dict"):  # a graph of PyTorch Geometric
            batch = batch.to_dict()
        elif hasattr(batch, "__dict__") and not isinstance(batch, Mapping):
            batch = vars(batch)
        if isinstance(batch, Mapping):
            batch = batch.values()
        if isinstance(batch, list) and len(batch) > 1 and isinstance(batch[0], (int, float, str)):
            yield torch.tensor([zlib.crc32(repr(value).encode()) for value in batch])
        elif isinstance(batch, (list, tuple, type({}.values()))):
            for part in batch:
                yield from tensors_in(part, depth + 1)


def sample_checksums(batch: object) -> list[int]:
    """Return a checksum of each sample of a batch, inputs and labels.

    Return one checksum of the whole batch if it is too large, if its tensors have no common first
    dimension, or if it is a single 1-D tensor, because numbers may be equal by chance.
    """
    tensors = [local_part(tensor).cpu() for tensor in tensors_in(batch)]
    tensors = [torch.view_as_real(part) if part.is_complex() else part for part in tensors]
    tensors = [part for part in tensors if part.dim()]
    sizes = {len(tensor) for tensor in tensors}
    if not tensors or all(not tensor.numel() for tensor in tensors):
        return []
    is_single_vector = len(tensors) == 1 and tensors[0].dim() == 1
    if len(sizes) > 1 or is_single_vector or sizes.pop() > LARGEST_BATCH:
        return [zlib.crc32(repr([tensor_checksum(tensor) for tensor in tensors]).encode())]
    return [zlib.crc32(repr([tensor_checksum(part) for part in row]).encode())
            for row in zip(*tensors)]


def dataset_checksum(dataset: object) -> int:
    """Return a checksum of the parts of a data set that are cheap to read.

    It is 0 if no attribute has len(dataset) entries: samples may be generated on the fly.
    """
    values = list(vars(dataset).values()) if hasattr(dataset, "__dict__") else []
    for value in list(values):
        if isinstance(value, (list, tuple)) and len(value) < 10:
            values += value
    items = [value for value in values if hasattr(value, "__len__") and getattr(value, "ndim", 1)
             and hasattr(dataset, "__len__") and len(value) == len(dataset)]
    text = repr([first_entries(value) for value in items])
    text = re.sub("0x[0-9a-f]+", "", text)  # addresses differ by process
    return zlib.crc32(text.encode()) if items else 0


def first_entries(value):
    if hasattr(value, "reshape"):  # a tensor or an array
        return value.reshape(-1)[:DATASET_ENTRIES].tolist()
    return value[:DATASET_ENTRIES] if isinstance(value, (list, tuple)) else value
