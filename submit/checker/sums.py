"""Numbers that stand for tensors, so that ranks can compare what is too large to send."""

import functools
import zlib

import numpy as np
import torch

CHUNK = 2**22
COLUMNS = 2**12
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


@functools.cache
def column_weights(device, dtype):
    """Return PROJECTIONS pseudo-random weights for each of COLUMNS columns."""
    return scatter(torch.arange(COLUMNS), 0).to(device, dtype)


def scatter(places, first):
    """Return PROJECTIONS pseudo-random numbers per place, -0.5 to 0.5; `first` chooses which."""
    numbers = torch.arange(first, first + PROJECTIONS)
    mixed = (places[:, None] + 1) * (2654435761 + 2 * numbers)
    mixed = mixed ^ (places[:, None] + 7 * numbers) * 40503
    return (mixed * 6364136223846793005 >> 33).double() / 2**31


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bytes: equal tensors have equal ones."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def samples(batch: torch.Tensor) -> list[int]:
    """Return a checksum of each sample of a batch."""
    return [fingerprint(sample) for sample in batch.detach().cpu()]


def projections(tensor: torch.Tensor) -> list[float]:
    """Return PROJECTIONS weighted sums of all elements, with pseudo-random weights.

    They are linear, as averaging is: the projections of averaged gradients are the average of
    their projections, and those of a whole tensor are the sum of its shards'.
    """
    local, first = shard_of(tensor)
    flat = local.reshape(-1)
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    sums = torch.zeros(PROJECTIONS, dtype=torch.float64)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start:start + CHUNK]
        before = (first + start) % COLUMNS
        after = -(before + part.numel()) % COLUMNS
        rows = torch.nn.functional.pad(part, (before, after)).view(-1, COLUMNS).to(dtype)
        products = (rows @ column_weights(flat.device, dtype)).cpu().double()
        numbers = torch.arange(len(products)) + (first + start) // COLUMNS
        sums += (products * scatter(numbers, 10)).sum(0)
    return sums.tolist()


def likeness(value: object, depth: int = 2) -> int:
    """Return a checksum of a data set, as far as it is cheap to read: equal for equal ones."""
    if torch.is_tensor(value):
        dense = value.layout == torch.strided
        return fingerprint(value.reshape(-1)[:SAMPLE]) if dense else 0
    if isinstance(value, np.ndarray):
        plain = value.dtype != object
        return zlib.crc32(value.reshape(-1)[:SAMPLE].tobytes()) if plain else 0
    if isinstance(value, (str, bytes, int, float)):
        return zlib.crc32(repr(value).encode())
    if isinstance(value, (list, tuple)) and depth:
        parts = [likeness(part, depth - 1) for part in value[:SAMPLE]]
        return zlib.crc32(repr([*parts, len(value)]).encode())
    if hasattr(value, "__dict__") and depth:
        return likeness([likeness(part, depth - 1) for _, part in sorted(vars(value).items())], 1)
    return 0
