"""Checks for exercise 2: a ring all-reduce."""

import time

import torch
import torch.distributed as dist
from runner import is_close, load_exercise, on_ranks, record_calls

RANKS, CHUNK_LENGTH = 4, 5
UNEVEN_LENGTH = 9  # of a tensor with chunks of 3, 2, 2 and 2
SUM = sum(10**rank for rank in range(RANKS))


def checks(file):
    yield from check_exchange(file)
    yield from check_phase(file, "reduce_scatter", (
        "rank r sends chunk r first. It adds (+=) what it receives to its own chunk of that "
        "number, and sends this chunk in the next step"))
    yield from check_phase(file, "all_gather", (
        "rank r sends chunk r + 1 first, which is a complete sum. What it receives is a complete "
        "sum, too: overwrite the chunk with copy_()"))
    yield from check_sum(file)


def check_exchange(file):
    def run_exercise(rank):
        """Start rank 0 late: without wait() the buffer is empty, or a later value is sent."""
        chunk, buffer = torch.full((CHUNK_LENGTH,), float(rank)), torch.full((CHUNK_LENGTH,), -1.0)
        calls, exercise = record_calls(), load_exercise(file)
        time.sleep(0.3 if rank == 0 else 0)
        exercise.exchange(chunk, buffer)
        values, calls = set(buffer.tolist()), list(calls)
        chunk.fill_(-2)
        dist.barrier()
        return {"values": values, "calls": calls}

    results = on_ranks(file, run_exercise, RANKS)
    yield check_messages("exchange", results, 1, CHUNK_LENGTH)
    yield "exchange: buffer has the left neighbour's chunk", all(
        result["values"] == {(rank - 1) % RANKS} for rank, result in enumerate(results)), (
        "irecv only starts the receive: buffer is not filled until you call wait() on the request "
        "it returns; isend only starts the send, so do not overwrite chunk before its wait()")


def check_phase(file, phase, rule):
    """Check reduce_scatter or all_gather, by the name in `phase`."""
    def run_exercise(rank):
        """Return one number per chunk: digit r counts how often rank r was added."""
        chunks = [torch.full((CHUNK_LENGTH,), float(10**rank), dtype=torch.float64)
                  for _ in range(RANKS)]
        if phase == "all_gather":
            chunks[(rank + 1) % RANKS].fill_(SUM)
        calls = record_calls()
        getattr(load_exercise(file), phase)(tuple(chunks))  # as tensor_split returns them
        return {"sums": [int(chunk[0]) for chunk in chunks], "calls": calls}

    results = on_ranks(file, run_exercise, RANKS)
    yield check_messages(phase, results, RANKS - 1, CHUNK_LENGTH)
    mistakes = []
    for rank, result in enumerate(results):
        chunks = range(RANKS) if phase == "all_gather" else [(rank + 1) % RANKS]
        mistakes += [f"on rank {rank} chunk {chunk} is {result['sums'][chunk]}"
                     for chunk in chunks if result["sums"][chunk] != SUM]
    yield f"{phase}: the chunks that it completes have the sum over all ranks", not mistakes, (
        f"{''.join(mistakes[:1])}, expected {SUM}, every rank added exactly once: {rule}. Change "
        "the chunk itself: = instead of += or copy_ makes a new tensor")


def check_sum(file):
    def run_exercise(rank):
        calls, summand = record_calls(), torch.randn(UNEVEN_LENGTH, dtype=torch.float64)
        tensor = summand.clone()
        load_exercise(file).ring_all_reduce(tensor)
        return {"summand": summand, "sum": tensor, "calls": calls}

    results = on_ranks(file, run_exercise, RANKS)
    total = sum(result["summand"] for result in results)
    yield f"ring_all_reduce: every rank has the sum of {UNEVEN_LENGTH} numbers", all(
        is_close(result["sum"], total) for result in results), (
        "the chunks must be views of the tensor that together cover every element, even when its "
        "length is not a multiple of N")
    yield check_messages("ring_all_reduce", results, 2 * (RANKS - 1), 3)


def check_messages(function, results, count, chunk_length):
    """Check that each rank sends `count` messages to the right, none longer than a chunk."""
    passed = True
    for rank, result in enumerate(results):
        calls = [call for call in result["calls"] if "recv" not in call[0]]
        passed &= [peer for _, _, peer in calls] == [(rank + 1) % RANKS] * count
        passed &= all(elements <= chunk_length for _, elements, _ in calls)
    return f"{function}: messages from each rank to its right neighbour: {count}", passed, (
        f"with {RANKS} ranks, expected {count} messages of at most {chunk_length} numbers; the "
        f"last rank calls {results[-1]['calls']}")
