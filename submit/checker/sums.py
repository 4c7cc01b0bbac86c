"""Numbers that stand for tensors, so that ranks can compare what is too large to send."""

import functools
import re
import zlib

import torch

COLUMNS = 2**16
PROJECTIONS = 3
SAMPLE = 1000  # entries of a list, an array or a tensor that likeness() reads


def shard_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the part of a tensor that this rank has, and where it begins in the whole."""
    if not hasattr(tensor, "to_local"):
        return tensor.detach(), 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements)
    first = sum(index * step for index, step in zip(offset, tensor.stride()))
    return tensor.to_local().detach(), first


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bytes: equal tensors have equal ones."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def samples(batch: torch.Tensor) -> list[int]:
    """Return a checksum of each sample of a batch."""
    return [fingerprint(sample) for sample in batch.detach().cpu()]


@functools.cache
def random_weights():
    generator = torch.Generator().manual_seed(0)  # the same on all ranks
    return torch.randn(COLUMNS, PROJECTIONS, generator=generator, dtype=torch.float64)


def projections(tensor: torch.Tensor) -> list[float]:
    """Return PROJECTIONS sums of all elements, with random weights that repeat after COLUMNS.

    They are linear, as averaging is: the projections of averaged gradients are the average of
    their projections, and those of a whole tensor are the sum of its shards'.
    """
    local, first = shard_of(tensor)
    before = first % COLUMNS
    after = -(before + local.numel()) % COLUMNS
    rows = torch.nn.functional.pad(local.reshape(-1), (before, after)).view(-1, COLUMNS)
    dtype = torch.float64 if local.dtype == torch.float64 else torch.float32
    return (rows.sum(0, dtype=dtype).cpu().double() @ random_weights()).tolist()


def likeness(dataset: object) -> int:
    """Return a checksum of a data set, as far as it is cheap to read: equal for equal ones.

    It is 0 where no attribute has as many entries as the data set: samples may be generated.
    """
    values = list(vars(dataset).values()) if hasattr(dataset, "__dict__") else []
    for value in list(values):
        if isinstance(value, (list, tuple)) and len(value) < 10:
            values += value
    items = [value for value in values if hasattr(value, "__len__") and getattr(value, "ndim", 1)
             and hasattr(dataset, "__len__") and len(value) == len(dataset)]
    text = repr([beginning(value) for value in items])
    return zlib.crc32(re.sub("0x[0-9a-f]+", "", text).encode()) if items else 0


def beginning(value):
    if hasattr(value, "reshape"):  # a tensor or an array
        return value.reshape(-1)[:SAMPLE].tolist()
    return value[:SAMPLE] if isinstance(value, (list, tuple)) else value
