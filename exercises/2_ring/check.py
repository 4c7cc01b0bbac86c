"""Checks for exercise 2: a ring all-reduce."""

import time

import torch
import torch.distributed as dist
from runner import load_exercise, on_ranks, record_calls, same

RANKS, LENGTH = 4, 5  # LENGTH: numbers per chunk
UNEVEN = 9  # numbers, for chunks of 3, 2, 2 and 2
WHOLE = sum(10**rank for rank in range(RANKS))


def checks(file):
    """Yield (description, passed, hint) for each check, in the order of the work."""
    yield from check_exchange(file)
    yield from check_half(file, "reduce_scatter", (
        "rank r sends chunk r first. It adds (+=) what it receives to its own chunk of that "
        "number, and sends this chunk in the next step"))
    yield from check_half(file, "all_gather", (
        "rank r sends chunk r + 1 first, a finished sum; what it receives is a finished sum, too: "
        "overwrite the chunk with copy_()"))
    yield from check_sum(file)


def check_exchange(file):
    def on_rank(rank):
        """Rank 0 begins later: without wait() the buffer is empty, or a later value is sent."""
        chunk, buffer = torch.full((LENGTH,), float(rank)), torch.full((LENGTH,), -1.0)
        calls, exercise = record_calls(), load_exercise(file)
        time.sleep(0.3 if rank == 0 else 0)
        exercise.exchange(chunk, buffer)
        received, calls = set(buffer.tolist()), list(calls)
        chunk.fill_(-2)
        dist.barrier()
        return {"received": received, "calls": calls}

    ranks = on_ranks(file, on_rank, RANKS)
    yield check_messages("exchange", ranks, 1, LENGTH)
    yield "exchange: buffer has the left neighbour's chunk", all(
        fact["received"] == {(rank - 1) % RANKS} for rank, fact in enumerate(ranks)), (
        "irecv only starts the receive: buffer is not filled until you call wait() on the request "
        "it returns; isend only starts the send, so do not overwrite chunk before its wait()")


def check_half(file, half, rule):
    """half: reduce_scatter or all_gather."""
    def on_rank(rank):
        """Return one number per chunk: digit r counts how often rank r was added."""
        chunks = [torch.full((LENGTH,), float(10**rank), dtype=torch.float64)
                  for _ in range(RANKS)]
        if half == "all_gather":
            chunks[(rank + 1) % RANKS].fill_(WHOLE)
        calls = record_calls()
        getattr(load_exercise(file), half)(tuple(chunks))  # as tensor_split returns them
        return {"after": [int(chunk[0]) for chunk in chunks], "calls": calls}

    ranks = on_ranks(file, on_rank, RANKS)
    yield check_messages(half, ranks, RANKS - 1, LENGTH)
    wrong = [f"on rank {rank} chunk {chunk} is {number}" for rank, facts in enumerate(ranks)
             for chunk, number in enumerate(facts["after"])
             if number != WHOLE and (half == "all_gather" or chunk == (rank + 1) % RANKS)]
    yield f"{half}: the right chunks have the sum over all ranks", not wrong, (
        f"{''.join(wrong[:1])}, expected {WHOLE}, every rank added exactly once: {rule}. Change "
        "the chunk itself: = instead of += or copy_ makes a new tensor")


def check_sum(file):
    def on_rank(rank):
        calls, own = record_calls(), torch.randn(UNEVEN, dtype=torch.float64)
        tensor = own.clone()
        load_exercise(file).ring_all_reduce(tensor)
        return {"own": own, "after": tensor, "calls": calls}

    ranks = on_ranks(file, on_rank, RANKS)
    total = sum(rank["own"] for rank in ranks)
    yield f"ring_all_reduce: every rank has the sum of {UNEVEN} numbers", all(
        same(rank["after"], total) for rank in ranks), (
        "the chunks must be views of the tensor that together cover every element, even when its "
        "length is not a multiple of N")
    yield check_messages("ring_all_reduce", ranks, 2 * (RANKS - 1), 3)


def check_messages(function, ranks, number, longest):
    """Check that each rank sends `number` messages to the right, none longer than a chunk."""
    right = True
    for rank, facts in enumerate(ranks):
        sent = [(peer, elements) for name, elements, peer in facts["calls"] if "recv" not in name]
        right &= [peer for peer, _ in sent] == [(rank + 1) % RANKS] * number
        right &= all(elements <= longest for _, elements in sent)
    return f"{function}: each rank sends {number} chunks to its right neighbour", right, (
        f"with {RANKS} ranks, expected {number} messages of at most {longest} numbers; the last "
        f"rank calls {facts['calls']}")
