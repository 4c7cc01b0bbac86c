"""Checksums and random projections of tensors: ranks compare these, not the tensors."""

import functools
import random
import zlib
from collections.abc import Iterator, Mapping

import numpy
import torch

COLUMNS = 2**16  # random weights per projection; they repeat after that
PROJECTIONS = 3  # per tensor
LARGEST_BATCH = 10_000  # samples; a larger batch gets one checksum
MAX_DEPTH = 4  # levels of a batch's containers


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, dense and real.

    Raises ValueError if the memory has been freed, because reading it would crash.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    freed = tensor.layout == torch.strided and not tensor.untyped_storage().nbytes()
    if freed and tensor.numel():
        raise ValueError("a tensor's memory has been freed")
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


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
    flat, before = local_part(tensor).reshape(-1).cpu().double(), offset % COLUMNS
    if before + len(flat) > COLUMNS:  # sum the elements that have the same weights
        padded = torch.nn.functional.pad(flat, (before, -(before + len(flat)) % COLUMNS))
        flat, before = padded.view(-1, COLUMNS).sum(0), 0
    return (flat @ random_weights()[before:before + len(flat)]).tolist()


def state_of(tensor: torch.Tensor) -> list[float]:
    """Return a tensor's checksum, followed by its projections."""
    local = local_part(tensor)
    return [tensor_checksum(local), *projections(local)]


# Data.

def tensors_in(batch: object, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch: in lists, dicts, arrays, and objects that contain tensors.

    A list of numbers or texts becomes a tensor of their checksums, of texts with two dimensions.
    """
    if torch.is_tensor(batch):
        yield local_part(batch).cpu()
    elif hasattr(batch, "__array_interface__"):  # an array, or an image of Pillow
        yield torch.as_tensor(numpy.array(batch))
    elif depth < MAX_DEPTH and not isinstance(batch, (str, bytes, torch.nn.Module)):
        if hasattr(batch, "to_dict"):  # a graph of PyTorch Geometric
            batch = batch.to_dict()
        elif hasattr(batch, "__dict__") and not isinstance(batch, Mapping):
            batch = vars(batch)
        if isinstance(batch, Mapping):
            batch = batch.values()
        if isinstance(batch, list) and len(batch) > 1 and isinstance(batch[0], (int, float, str)):
            values = torch.tensor([zlib.crc32(repr(value).encode()) for value in batch])
            yield values[:, None] if isinstance(batch[0], str) else values
        elif isinstance(batch, (list, tuple, type({}.values()))):
            for part in batch:
                yield from tensors_in(part, depth + 1)


def batch_checksums(batch: object) -> list[str]:
    """Return a text for each sample of a batch: a checksum of each of its tensors.

    Return one text for the whole batch if it is too large, if its tensors have no common first
    dimension, or if it is a single 1-D tensor.
    """
    tensors = [part for part in tensors_in(batch) if part.dim()]
    sizes = {len(tensor) for tensor in tensors}
    if not any(tensor.numel() for tensor in tensors):
        return []
    is_single_vector = len(tensors) == 1 and tensors[0].dim() == 1
    if len(sizes) > 1 or is_single_vector or sizes.pop() > LARGEST_BATCH:
        return [checksums(tensors)]
    return [checksums(row) for row in zip(*tensors)]


def checksums(tensors):
    return " ".join(str(tensor_checksum(tensor)) for tensor in tensors)


def sample_checksum(dataset: object, index: int) -> str:
    """Return a checksum of dataset[index], before it is collated, with the same seed for all."""
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    return checksums(tensors_in([dataset[index]]))


def random_states() -> dict[str, int]:
    """Return checksums of the states of the random numbers."""
    _, words, position, *_ = numpy.random.get_state()
    states = {"Python's": random.getstate(), "NumPy's": (words.tobytes(), position)}
    checksums_by_name = {name: zlib.crc32(repr(state).encode()) for name, state in states.items()}
    checksums_by_name["PyTorch's"] = tensor_checksum(torch.get_rng_state())
    if torch.cuda.is_initialized():
        checksums_by_name["the GPU's"] = tensor_checksum(torch.cuda.get_rng_state())
    return checksums_by_name
