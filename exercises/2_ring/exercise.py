"""Sum over a ring of ranks.

An all-reduce made of messages between neighbours. The right neighbour of rank r is rank r + 1; that
of the last rank is rank 0. In every step each rank sends one of N chunks to its right neighbour and
receives one from its left neighbour. N is the number of ranks.
"""

import torch
import torch.distributed as dist


def exchange(chunk, buffer):
    """Send `chunk` to the right neighbour and receive the left neighbour's chunk into `buffer`.

    Returns when `buffer` is filled and `chunk` is sent.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    raise NotImplementedError  # your lines: right = ... and left = ..., the neighbours
    # Your lines. Every rank runs them: if every rank waits for its send first, all deadlock.
    raise NotImplementedError


def reduce_scatter(chunks):
    """Make N - 1 steps, after which rank r has the sum of chunk (r + 1) % N over all ranks.

    `chunks` is a tuple of N tensors, changed in place. Rank r sends chunk r first. It adds each
    chunk that it receives to its own chunk of that number, and sends the sum in the next step.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(world_size - 1):
        # Your lines: which chunk does this step send, and which does it receive?
        raise NotImplementedError


def all_gather(chunks):
    """Make N - 1 more steps, after which every rank has the sums of all chunks.

    Rank r sends chunk (r + 1) % N first, which is a sum already. Each chunk that it receives
    overwrites its own chunk of that number, and is sent in the next step.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(world_size - 1):
        raise NotImplementedError  # your lines


def ring_all_reduce(tensor):
    """Replace the one-dimensional `tensor` by the sum over all ranks, in place.

    Its length need not be a multiple of N; the chunks' lengths then differ by at most one.
    """
    # Your line: chunks = N views of `tensor`, so that changing a chunk changes the tensor.
    raise NotImplementedError
    reduce_scatter(chunks)
    all_gather(chunks)
