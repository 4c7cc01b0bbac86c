"""What the grade of exercise 6 looks at."""

import torch
from runner import counted, flat, learner, on_ranks, same
from torch import nn
from torch.utils._pytree import tree_leaves

RANKS, STEPS, LR, MOMENTUM = 3, 3, 0.1, 0.9
TOTAL, SHARD = 23, 8  # parameters of the model, which 3 does not divide
PART = (RANKS - 1) / RANKS  # of its numbers a rank sends in a ring, of the whole row or of all shards together
SENT = {"all_reduce": 2 * PART, "reduce_scatter": RANKS * PART, "all_gather": RANKS * PART, "send": 1, "isend": 1,
        "all_gather_into_tensor": RANKS * PART, "all_gather_single": RANKS * PART, "recv": 0, "irecv": 0}


def points(file):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    yield from points_of_shards(file)
    torch.manual_seed(0)
    rows = torch.randn(RANKS, RANKS * SHARD, dtype=torch.float64)
    gradients = torch.randn(STEPS, RANKS, TOTAL, dtype=torch.float64)
    mean, whole = rows.mean(0), rows[:, :SHARD].flatten()
    yield from points_of_method(file, "average", rows, mean.split(SHARD), (
        f"its own shard of the mean, and the sum is {RANKS} times the mean"))
    yield from points_of_method(file, "gather", whole.split(SHARD), [whole] * RANKS, (
        "all shards, one after the other, in the ranks' order"))
    yield from points_of_steps(file, gradients)


def points_of_shards(file):
    def making(rank):
        model, optimizer = optimized(file)
        return (optimizer.begin, optimizer.end), held(optimizer, model)
    shards, sizes = zip(*on_ranks(file, making, RANKS))
    yield f"the shards of {RANKS} ranks are all {TOTAL} parameters", list(shards) == [
        (rank * SHARD, (rank + 1) * SHARD) for rank in range(RANKS)], (
        f"{TOTAL} parameters, {RANKS} ranks, and rank by rank begin and end are {shards}: all shards have one length, "
        "rounded up, so that no parameter is left out")
    yield small("at the start", sizes)


def points_of_method(file, method, given, wanted, rule):
    """given: what the method gets on each rank; wanted: what it is to return there."""
    def calling(rank):
        calls = counted()
        _, optimizer = optimized(file)
        calls.clear()
        return getattr(optimizer, method)(given[rank].clone()), list(calls)
    got, calls = zip(*on_ranks(file, calling, RANKS))
    yield f"{method}: each rank gets what it has to", all(map(same, got, wanted)), (
        f"each gets {rule}; rank 0 has {' '.join(str(got[0]).split())}")
    sent, allowed = sum(SENT.get(name, PART) * elements for name, elements, _ in calls[0]), (RANKS - 1) * SHARD
    yield f"{method}: a rank sends no more than {allowed} numbers", sent <= allowed, (
        f"{', '.join(name for name, *_ in calls[0])}: {sent:.4g} numbers from a rank, where {allowed} are enough")


def points_of_steps(file, gradients):
    """gradients[step][rank]: all numbers in a row."""
    def stepping(rank):
        """Some steps, each from gradients of its own, beside those of an optimizer with the whole state."""
        model, optimizer = optimized(file)
        expected, velocity, right = flat(model.parameters()), torch.zeros(TOTAL, dtype=torch.float64), []
        for of_ranks in gradients:
            parts = of_ranks[rank].split([parameter.numel() for parameter in model.parameters()])
            for parameter, part in zip(model.parameters(), parts):
                parameter.grad = part.view_as(parameter).clone()
            optimizer.step()
            velocity = MOMENTUM * velocity + of_ranks.mean(0)
            expected = expected - LR * velocity
            right.append(same(flat(model.parameters()), expected))
        return right, held(optimizer, model)
    right, sizes = zip(*on_ranks(file, stepping, RANKS))
    yield "each step is that of the optimizer with the whole state", all(map(all, right)), (
        f"right, step by step: {right[0]}; update changes own in place (own -= ...), and keeps velocity in self")
    yield small("at the end", sizes)


def optimized(file):
    """A model, the same on all ranks, and the learner's optimizer of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, learner(file).ShardedSGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def small(when, sizes):
    return f"each rank's state is one shard, {8 * SHARD} bytes, {when}", max(sizes) <= 8 * SHARD, (
        f"a rank holds {max(sizes)} bytes, of all parameters it is {8 * TOTAL}; a view keeps all it was cut from")


def held(optimizer, model):
    """The bytes that the optimizer holds beside parameters and gradients."""
    given = [one for parameter in model.parameters() for one in (parameter, parameter.grad) if one is not None]
    others = {one.untyped_storage().data_ptr() for one in given}
    found = {one.untyped_storage() for one in tree_leaves(vars(optimizer)) if torch.is_tensor(one)}
    return sum({one.data_ptr(): one.nbytes() for one in found if one.data_ptr() not in others}.values())
