"""Sum over a ring of ranks.

An all-reduce out of messages between neighbours. The right neighbour of rank r is rank r + 1, that
of the last rank is rank 0. In every step each rank sends one of N chunks to the right and receives
one from the left.
"""

import torch
import torch.distributed as dist


def exchange(chunk, room):
    """Send `chunk` to the right, and receive into `room` what comes from the left.

    Returns when `room` is filled and `chunk` is sent.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    raise NotImplementedError  # your lines: right = and left =, the neighbours' numbers
    # Your lines: all ranks are here at the same time, so not all may wait for their send.
    raise NotImplementedError


def reduce_scatter(chunks):
    """Make N - 1 steps: rank r ends with the sum over all ranks of chunk r + 1, the last of 0.

    `chunks` is a tuple of N tensors, changed in place. Rank r begins by sending chunk r. What it
    receives, it adds to its own chunk of the same number, which it sends in the next step.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks - 1):
        # Your lines: which chunk goes out in this step, and which comes in?
        raise NotImplementedError


def all_gather(chunks):
    """Make N - 1 more steps: afterwards every rank has every sum.

    Rank r begins by sending chunk r + 1, its sum. What it receives takes the place of its own chunk
    of the same number, which it sends in the next step.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks - 1):
        raise NotImplementedError  # your lines


def ring_all_reduce(tensor):
    """Change `tensor`, which has one axis, to the sum of all ranks' tensors, in place.

    Its length need not be a multiple of N: then chunks differ in length, by one at most.
    """
    # Your line: chunks = N parts that share tensor's memory: it changes with them.
    raise NotImplementedError
    reduce_scatter(chunks)
    all_gather(chunks)
