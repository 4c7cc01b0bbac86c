"""Sum over a ring of ranks.

An all-reduce with nothing but messages between neighbours. The ranks stand in a ring: the right
neighbour of rank r is rank r + 1, that of the last rank is rank 0. The buffer is cut into N chunks,
one for each of the N ranks. In every step each rank sends one chunk to its right neighbour and
receives one from its left.
"""

import torch
import torch.distributed as dist


def exchange(chunk, room):
    """One step: send `chunk` to the right neighbour, and receive into `room` what the left
    neighbour sends.

    Both are tensors with one axis. Returns when `room` is filled and `chunk` is sent.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    raise NotImplementedError  # your lines: right = and left =, the neighbours' numbers
    # Your lines: all ranks are here at the same time, so not all may wait for their send.
    raise NotImplementedError


def reduce_scatter(chunks):
    """The first half, N - 1 steps: rank r ends with the sum over all ranks of chunk r + 1, the last
    rank of chunk 0.

    `chunks` is a tuple of N tensors, this rank's numbers. They are changed in place. Rank r begins
    by sending chunk r. What it receives in a step, it adds to its own chunk of the same number. In
    the next step it sends that chunk.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks - 1):
        # Your lines: which chunk goes out in this step, and which comes in?
        raise NotImplementedError


def all_gather(chunks):
    """The second half, N - 1 steps. Afterwards every rank has every sum.

    `chunks` are as reduce_scatter leaves them: on rank r only chunk r + 1 is a sum over all ranks.
    It is what rank r sends first. What it receives in a step takes the place of its own chunk of
    the same number. In the next step it sends that chunk.
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
