"""Numbers that stand for tensors, so that ranks can compare what is too large to send."""

import functools
import zlib

import numpy as np
import torch

CHUNK = 2**22
COLUMNS = 2**12
PROJECTIONS = 3
LOOKED_AT = 1000  # of what a data set holds in a list, an array, or a tensor


def shard_of(tensor):
    """The part of a tensor that this rank has, and the place in the whole where it begins."""
    if not hasattr(tensor, "to_local"):
        return tensor.detach(), 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach(), sum(at * step for at, step in zip(offset, tensor.stride()))


@functools.cache
def column_weights(device, dtype):
    """PROJECTIONS pseudo-random weights for each of COLUMNS columns."""
    return scatter(torch.arange(COLUMNS), 0).to(device, dtype)


def scatter(place, first):
    """PROJECTIONS pseudo-random numbers from -0.5 to 0.5 for each place; `first` chooses which."""
    numbers = torch.arange(first, first + PROJECTIONS)
    mixed = (place[:, None] + 1) * (2654435761 + 2 * numbers) ^ (place[:, None] + 7 * numbers) * 40503
    return (mixed * 6364136223846793005 >> 33).double() / 2**31


def fingerprint(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bytes: equal tensors have equal ones."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def items(batch: torch.Tensor) -> list[int]:
    """A checksum of each of a batch's items."""
    return [fingerprint(item) for item in batch.detach().cpu()]


def projections(tensor: torch.Tensor) -> list[float]:
    """PROJECTIONS sums of all elements, each with its own pseudo-random weight: linear, as averaging is.

    So the projections of an average of gradients are the average of their projections, and those of a whole tensor are
    the sum of its shards'.
    """
    local, first = shard_of(tensor)
    flat, sums = local.reshape(-1), torch.zeros(PROJECTIONS, dtype=torch.float64)
    kind = torch.float64 if flat.dtype == torch.float64 else torch.float32
    for start in range(0, flat.numel(), CHUNK):
        part, before = flat[start:start + CHUNK], (first + start) % COLUMNS
        padded = torch.nn.functional.pad(part, (before, -(before + part.numel()) % COLUMNS))  # to whole rows
        products = (padded.view(-1, COLUMNS).to(kind) @ column_weights(flat.device, kind)).cpu().double()
        rows = torch.arange(len(products)) + (first + start) // COLUMNS
        sums += (products * scatter(rows, 10)).sum(0)
    return sums.tolist()


def likeness(value: object, depth: int = 2) -> int:
    """A number that follows from what a data set holds, as far as it is cheap to look: the same for equal ones."""
    if torch.is_tensor(value):
        return fingerprint(value.reshape(-1)[:LOOKED_AT]) if value.layout == torch.strided else 0
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.reshape(-1)[:LOOKED_AT].tobytes()) if value.dtype != object else 0
    if isinstance(value, (str, bytes, int, float)):
        return zlib.crc32(repr(value).encode())
    if isinstance(value, (list, tuple)) and depth:
        return zlib.crc32(repr([likeness(item, depth - 1) for item in value[:LOOKED_AT]] + [len(value)]).encode())
    if hasattr(value, "__dict__") and depth:
        return likeness([likeness(item, depth - 1) for _, item in sorted(vars(value).items())], 1)
    return 0
