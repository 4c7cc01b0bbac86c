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
    place = torch.arange(COLUMNS)
    return torch.stack([scatter(place, number) for number in range(PROJECTIONS)], 1).to(device, dtype)


def scatter(place, number):
    """Pseudo-random numbers from -0.5 to 0.5, which follow from the places and the number of a projection."""
    mixed = (place + 1) * (2654435761 + 2 * number) ^ (place + 7 * number) * 40503
    return (mixed * 6364136223846793005 >> 33).double() / 2**31


def table(flat, before=0):
    """A flat tensor as rows of COLUMNS numbers: with `before` zeros in front of it, and others behind."""
    return torch.nn.functional.pad(flat, (before, -(before + flat.numel()) % COLUMNS)).view(-1, COLUMNS)


def words(tensor):
    """A tensor's bytes along its last dimension as integers of 64 bits, with zeros behind them to fill the last."""
    found = tensor.contiguous().view(torch.uint8)
    found = torch.nn.functional.pad(found, (0, -found.shape[-1] % 8))
    return (found if found.data_ptr() % 8 == 0 else found.clone()).view(torch.int64)


def fingerprint(tensor: torch.Tensor) -> int:
    """A number of 64 bits that another value of any element makes another: equal tensors have equal ones."""
    flat, total = shard_of(tensor)[0].reshape(-1), 0
    for number, start in enumerate(range(0, flat.numel(), CHUNK)):
        found = words(flat[start:start + CHUNK])
        full = len(found) // COLUMNS * COLUMNS
        sums = torch.cat([found[:full].view(-1, COLUMNS).sum(1), found[full:].sum(0, keepdim=True)])
        rows = torch.arange(len(sums), device=sums.device) + number * CHUNK
        total += (sums * (2 * rows + 1)).sum().item()
    return total % 2**64


def projections(tensor: torch.Tensor) -> list[float]:
    """PROJECTIONS sums of all elements, each with its own pseudo-random weight: linear, as averaging is.

    So the projections of an average of gradients are the average of their projections, and those of a whole tensor are
    the sum of its shards'.
    """
    local, first = shard_of(tensor)
    flat, sums = local.reshape(-1), torch.zeros(PROJECTIONS, dtype=torch.float64)
    for start in range(0, flat.numel(), CHUNK):
        place = first + start
        lines = table(flat[start:start + CHUNK], place % COLUMNS)
        kind = torch.float64 if lines.dtype == torch.float64 else torch.float32
        products = (lines.to(kind) @ column_weights(lines.device, kind)).cpu().double()
        rows = torch.arange(len(products)) + place // COLUMNS
        sums += (products * torch.stack([scatter(rows, 10 + number) for number in range(PROJECTIONS)], 1)).sum(0)
    return sums.tolist()


def items(batch: torch.Tensor) -> list[int]:
    """A fingerprint of each of a batch's items, by their values and the order of these."""
    found = words(batch.detach().reshape(len(batch), -1))
    place = torch.arange(found.shape[1], device=found.device)
    return (found * (place * 6364136223846793005 + 1442695040888963407)).sum(1).tolist()


def is_any(tensor: torch.Tensor) -> bool:
    """Whether there is anything but zeros in a tensor, or in this rank's part of it."""
    return bool(shard_of(tensor)[0].any())


def likeness(value: object, depth: int = 2) -> int:
    """A number that follows from what a data set holds, as far as it is cheap to look: the same for equal ones."""
    if torch.is_tensor(value):
        return fingerprint(value.reshape(-1)[:LOOKED_AT]) if value.layout == torch.strided else 0
    if isinstance(value, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(value.reshape(-1)[:LOOKED_AT]).tobytes()) if value.dtype != object else 0
    if isinstance(value, (str, bytes, int, float)):
        return zlib.crc32(repr(value).encode())
    if isinstance(value, (list, tuple)) and depth:
        return zlib.crc32(repr([likeness(item, depth - 1) for item in value[:LOOKED_AT]] + [len(value)]).encode())
    if hasattr(value, "__dict__") and depth:
        return likeness([likeness(item, depth - 1) for _, item in sorted(vars(value).items())], 1)
    return 0


def size_of(value: object) -> int:
    """Bytes of a tensor or of a list of tensors; 0 for anything else."""
    if torch.is_tensor(value):
        return value.numel() * value.element_size()
    return sum(map(size_of, value)) if isinstance(value, (list, tuple)) else 0
