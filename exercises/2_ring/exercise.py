"""Sum over a ring of ranks.

An all-reduce made of messages between neighbours. The right neighbour of rank r is rank r + 1; that
of the last rank is rank 0. In every step each rank sends one of N chunks to the right and receives
one from the left.
"""

import torch
import torch.distributed as dist


def exchange(chunk, buffer):
    """Send `chunk` to the right neighbour and receive the left neighbour's chunk into `buffer`.

    Returns when `buffer` is filled and `chunk` is sent.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    raise NotImplementedError  # your lines: right = ... and left = ..., the neighbours
    # Your lines. All ranks are here at once: if all wait for their send first, they deadlock.
    raise NotImplementedError


def reduce_scatter(chunks):
    """Make N - 1 steps: rank r ends up with the total of chunk (r + 1) % N.

    `chunks` is a tuple of N tensors, changed in place. Rank r begins by sending chunk r. It adds
    what it receives to its own chunk of the same number, and sends that in the next step.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks - 1):
        # Your lines: which chunk does this step send, and which does it receive?
        raise NotImplementedError


def all_gather(chunks):
    """Make N - 1 more steps: afterwards every rank has every total.

    Rank r begins by sending chunk (r + 1) % N, its total. What it receives overwrites its own chunk
    of the same number, which it sends in the next step.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks - 1):
        raise NotImplementedError  # your lines


def ring_all_reduce(tensor):
    """Replace the one-dimensional `tensor` by the sum over all ranks, in place.

    Its length need not be a multiple of N; the chunks' lengths then differ by at most one.
    """
    # Your line: chunks = N views of `tensor`, so that changing a chunk changes the tensor.
    raise NotImplementedError
    reduce_scatter(chunks)
    all_gather(chunks)
