"""What the grade of exercise 2 looks at."""

import time

import torch
import torch.distributed as dist
from runner import NoEnd, NotRun, in_stages

RANKS, LENGTH = 4, 5
LENGTHS = 1000, 1002, 9
WHOLE = sum(10**rank for rank in range(RANKS))


def watch(file):
    """What each function does, called on its own, until one does not run."""
    stages = {"exchange": exchanging, "reduce_scatter": reduce_scattering, "all_gather": all_gathering}
    stages |= {f"{length:,} numbers": summing(length) for length in LENGTHS}
    try:
        facts = in_stages(file, stages, RANKS)
    except NoEnd as problem:
        raise NotRun(f"{problem}; {waiting(problem.last)}") from None
    return {name: NotRun(f"{found}; {waiting(found.last)}") if isinstance(found, NoEnd) else found
            for name, found in facts.items()}


def waiting(last):
    """Why ranks wait for each other: from the last message that each has begun."""
    last = {rank: (name, peer) for rank, (name, _, _, peer) in sorted(last.items()) if name != "barrier"}
    if not last:
        return "none of them has begun to send or receive"
    if len(last) == RANKS and all(name == "send" for name, _ in last.values()):
        return "all are in dist.send, which waits until the other receives; that one is in its send, too"
    for rank, (name, peer) in last.items():
        if "recv" in name and peer != (rank - 1) % RANKS:
            return f"rank {rank} waits for a message of rank {peer}: who sends to it in a ring?"
        if "send" in name and peer != (rank + 1) % RANKS:
            return f"rank {rank} sends to rank {peer}, which does not wait for it"
    return "does each receive as often as its left neighbour sends?"


def exchanging(rank, exercise, calls):
    """One exchange, which rank 0 begins later: who does not wait has an empty room, or sends what comes after."""
    chunk, room = torch.full((LENGTH,), float(rank)), torch.full((LENGTH,), -1.0)
    time.sleep(0.3 if rank == 0 else 0)
    exercise.exchange(chunk, room)
    received = room.clone()
    chunk.fill_(-2)
    found = {"received": received, "calls": list(calls)}
    dist.barrier()
    return found


def reduce_scattering(rank, exercise, calls):
    """The first half. A rank's number is a power of ten, so the digits of a sum say whose numbers are in it."""
    return halving(exercise.reduce_scatter, [10**rank] * RANKS, calls)


def all_gathering(rank, exercise, calls):
    """The second half, from what the first one leaves: chunk c has been at ranks c, c + 1 and so on to this one."""
    been_at = [range(chunk, chunk + (rank - chunk) % RANKS + 1) for chunk in range(RANKS)]
    return halving(exercise.all_gather, [sum(10 ** (other % RANKS) for other in others) for others in been_at], calls)


def halving(function, numbers, calls):
    chunks = [torch.full((LENGTH,), float(number), dtype=torch.float64) for number in numbers]
    given = list(chunks)
    function(chunks)
    return {"before": numbers, "after": [int(chunk[0]) for chunk in given], "calls": list(calls),
            "others": [number for number, chunk in enumerate(chunks) if chunk is not given[number]]}


def summing(length):
    """The whole, on random numbers."""
    def stage(rank, exercise, calls):
        own = torch.randn(length, dtype=torch.float64)
        tensor = own.clone()
        exercise.ring_all_reduce(tensor)
        return {"own": own, "after": tensor, "calls": list(calls)}
    return stage


def sent(fact):
    """The messages that a rank has sent: (peer, elements)."""
    return [(peer, elements) for name, elements, _, peer in fact["calls"] if name in ("send", "isend")]


def collectives(ranks):
    """The names of what was called and is no message."""
    return sorted({name for fact in ranks for name, *_ in fact["calls"]} - {"send", "isend", "recv", "irecv"})


def points(facts):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    looking_at = {"exchange": points_of_exchange, "reduce_scatter": points_of_reduce_scatter,
                  "all_gather": points_of_all_gather}
    for name, ranks in facts.items():
        if isinstance(ranks, NotRun):
            hint = str(ranks)
            if name == f"{LENGTHS[-1]} numbers" and "IndexError" in hint:
                hint = f"{hint}: of {LENGTHS[-1]} numbers torch.chunk makes 3 chunks, not 4"
            yield f"{name}: it runs to its end", False, hint
        called = collectives(ranks)
        if called:
            yield f"{name}: with messages alone", False, (
                f"{called[0]} is a collective: here you send and receive yourself")
        yield from looking_at.get(name, points_of_sum)(ranks)


def points_of_exchange(ranks):
    peers = [[peer for peer, _ in sent(fact)] for fact in ranks]
    names = [f"rank {peer}" for peer in peers[0]]
    hint = f"rank 0 sends to {', '.join(names) or 'nobody'}; its right neighbour is rank 1"
    if peers == [[(rank - 1) % RANKS] for rank in range(RANKS)]:
        hint = "the messages go to the left neighbours: the other way round"
    yield "exchange: each rank sends one message, to its right neighbour", (
        peers == [[(rank + 1) % RANKS] for rank in range(RANKS)]), hint

    received = [fact["received"] for fact in ranks]
    hint = "room is not what the left neighbour has sent"
    if any((one == -1).all() for one in received):
        hint = "room is still empty on return: irecv only begins to receive; call wait() of what it returns"
    elif any((one == -2).all() for one in received):
        hint = ("room holds what the left neighbour has written into its chunk after its exchange: isend only begins "
                "to send; call wait() of what it returns")
    yield "exchange: room is what the left neighbour has sent", all(
        (one == (rank - 1) % RANKS).all() for rank, one in enumerate(received)), hint


def points_of_steps(half, ranks):
    counts = {len(sent(fact)) for fact in ranks}
    yield f"{half}: N - 1 messages from each rank", counts == {RANKS - 1}, (
        f"{max(counts)} messages from a rank; N is {RANKS}, so it takes {RANKS - 1}")
    most = max(elements for fact in ranks for _, elements in sent(fact))
    yield f"{half}: each message is one chunk", most == LENGTH, (
        f"a message has {most} numbers, a chunk {LENGTH}: only one chunk travels in a step")


def in_place(half, ranks):
    others = ranks[0]["others"]
    return f"{half}: the chunks themselves are changed", not any(fact["others"] for fact in ranks), (
        f"chunks[{others[0] if others else 0}] is another tensor than before, and the buffer of which it was a part "
        "stays as it is: += and copy_ change a tensor in place, = puts another one there")


def points_of_reduce_scatter(ranks):
    yield from points_of_steps("reduce_scatter", ranks)
    yield in_place("reduce_scatter", ranks)
    states = [fact["after"] for fact in ranks]
    got = [states[rank][(rank + 1) % RANKS] for rank in range(RANKS)]
    shifts = {(state.index(WHOLE) - rank) % RANKS for rank, state in enumerate(states) if WHOLE in state}
    hint = told(0, 1, got[0])
    if all(fact["before"] == fact["after"] for fact in ranks):
        hint = "the chunks are what they were: add what was received, in place (+=)"
    elif len(shifts) == 1:
        hint = (f"the sums are complete, but in other places: rank 0 has that of chunk {states[0].index(WHOLE)}. To "
                "end with chunk 1 it begins by sending chunk 0")
    elif all(number in (1, 10, 100, 1000) for number in got):
        hint = f"{hint} alone: add what is received to what is there"
    else:
        hint = f"{hint}: what was received in one step, and added, goes out in the next"
    yield "reduce_scatter: rank r has the sum of chunk r + 1", all(number == WHOLE for number in got), hint


def points_of_all_gather(ranks):
    yield from points_of_steps("all_gather", ranks)
    yield in_place("all_gather", ranks)
    wrong = [(rank, chunk, number) for rank, fact in enumerate(ranks) for chunk, number in enumerate(fact["after"])
             if number != WHOLE]
    hint = told(*wrong[0]) if wrong else ""
    if all(fact["before"] == fact["after"] for fact in ranks):
        hint = "the chunks are what they were: receive into them, or copy into them in place"
    elif any(number > WHOLE for _, _, number in wrong):
        hint = f"{hint}: what is received is a finished sum, it takes the place of what is there"
    elif wrong:
        hint = f"{hint}: rank r begins with chunk r + 1, and goes on with what it has just received"
    yield "all_gather: every rank has every sum", not wrong, hint


def told(rank, chunk, number):
    """Whose numbers are in a sum of powers of ten."""
    counts = [number // 10**other % 10 for other in range(RANKS)]
    parts = [f"rank {other}'s" + f" {count} times" * (count > 1) for other, count in enumerate(counts) if count]
    return f"on rank {rank} chunk {chunk} is the sum of {' and '.join(parts) or 'nothing'}"


def points_of_sum(ranks):
    length = len(ranks[0]["own"])
    total = sum(fact["own"] for fact in ranks)
    right = torch.stack([torch.isclose(fact["after"], total, rtol=1e-9, atol=1e-12) for fact in ranks]).all(0)
    hint = "each number is to be in one chunk, and the chunks in the order of the tensor"
    if all(torch.equal(fact["own"], fact["after"]) for fact in ranks):
        hint = "the tensor is what it was: the chunks are copies; parts that share its memory change it"
    elif not right.all() and right[:-RANKS].all():
        rest = int((~right).sum())
        hint = f"all but the last {rest}: {RANKS} does not divide {length:,}, and the rest was left out"
    yield f"ring_all_reduce: every rank has the sum of {length:,} numbers", bool(right.all()), hint
    most = max(sum(elements for _, elements in sent(fact)) for fact in ranks)
    allowed = 2 * (RANKS - 1) * -(-length // RANKS)
    yield f"ring_all_reduce: each rank sends 2(N-1)/N of the {length:,}", most <= allowed, (
        f"a rank sends {most:,} numbers; {2 * (RANKS - 1)} chunks are {allowed:,}")
