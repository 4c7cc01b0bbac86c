"""What the grade of exercise 2 looks at."""

import time

import torch
import torch.distributed as dist
from runner import counted, learner, on_ranks, same

RANKS, LENGTH = 4, 5  # of a chunk
UNEVEN = 9  # numbers, for chunks of 3, 2, 2 and 2
WHOLE = sum(10**rank for rank in range(RANKS))


def points(file):
    """Yield (what, whether it is right, the hint if not), in the learner's order."""
    yield from points_of_exchange(file)
    yield from points_of_half(file, "reduce_scatter", (
        "rank r sends chunk r first. What it receives it adds (+=) to its own chunk of that "
        "number, and sends in the next step"))
    yield from points_of_half(file, "all_gather", (
        "rank r sends chunk r + 1 first, a finished sum. What it receives is one, too, and takes "
        "the place of what is there (copy_)"))
    yield from points_of_sum(file)


def points_of_exchange(file):
    def on_rank(rank):
        """Rank 0 begins later: who does not wait has an empty room, or sends what comes after."""
        chunk, room = torch.full((LENGTH,), float(rank)), torch.full((LENGTH,), -1.0)
        calls, exercise = counted(), learner(file)
        time.sleep(0.3 if rank == 0 else 0)
        exercise.exchange(chunk, room)
        received, calls = set(room.tolist()), list(calls)
        chunk.fill_(-2)
        dist.barrier()
        return {"received": received, "calls": calls}

    ranks = on_ranks(file, on_rank, RANKS)
    yield point_of_messages("exchange", ranks, 1, LENGTH)
    yield "exchange: room is what the left neighbour has sent", all(
        fact["received"] == {(rank - 1) % RANKS} for rank, fact in enumerate(ranks)), (
        "irecv only begins to receive, and room is empty until wait() of what it returns; isend "
        "only begins to send, and what is written into chunk before its wait() may be sent instead")


def points_of_half(file, half, rule):
    """half: reduce_scatter or all_gather."""
    def on_rank(rank):
        """Return a number per chunk that says in each digit how often a rank is in it."""
        chunks = [torch.full((LENGTH,), float(10**rank), dtype=torch.float64)
                  for _ in range(RANKS)]
        if half == "all_gather":
            chunks[(rank + 1) % RANKS].fill_(WHOLE)
        calls = counted()
        getattr(learner(file), half)(tuple(chunks))  # as tensor_split returns them
        return {"after": [int(chunk[0]) for chunk in chunks], "calls": calls}

    ranks = on_ranks(file, on_rank, RANKS)
    yield point_of_messages(half, ranks, RANKS - 1, LENGTH)
    wrong = [f"on rank {rank} chunk {chunk} is {number}" for rank, facts in enumerate(ranks)
             for chunk, number in enumerate(facts["after"])
             if number != WHOLE and (half == "all_gather" or chunk == (rank + 1) % RANKS)]
    yield f"{half}: the sums over all ranks, in their places", not wrong, (
        f"{''.join(wrong[:1])}, and should be {WHOLE}, once each rank's numbers: {rule}. The chunk "
        "itself has to change: = in place of += or copy_ makes another tensor")


def points_of_sum(file):
    def on_rank(rank):
        calls, own = counted(), torch.randn(UNEVEN, dtype=torch.float64)
        tensor = own.clone()
        learner(file).ring_all_reduce(tensor)
        return {"own": own, "after": tensor, "calls": calls}

    ranks = on_ranks(file, on_rank, RANKS)
    total = sum(rank["own"] for rank in ranks)
    yield f"ring_all_reduce: every rank has the sum of {UNEVEN} numbers", all(
        same(rank["after"], total) for rank in ranks), (
        "each number has to be in one chunk, also where N does not divide them, in the tensor's "
        "order and memory")
    yield point_of_messages("ring_all_reduce", ranks, 2 * (RANKS - 1), 3)


def point_of_messages(function, ranks, number, longest):
    """Has each rank sent so many messages to its right neighbour, none longer than a chunk?"""
    right = True
    for rank, facts in enumerate(ranks):
        sent = [(peer, elements) for name, elements, peer in facts["calls"] if "recv" not in name]
        right &= [peer for peer, _ in sent] == [(rank + 1) % RANKS] * number
        right &= all(elements <= longest for _, elements in sent)
    return f"{function}: each rank sends {number} chunks to its right neighbour", right, (
        f"with {RANKS} ranks it takes {number} messages of at most {longest} numbers; the last "
        f"rank calls {facts['calls']}")
