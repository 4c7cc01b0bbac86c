"""What the grade of exercise 6 looks at."""

import torch
from runner import counted, flat, learner, on_ranks, same
from torch import nn
from torch.utils._pytree import tree_leaves

RANKS, STEPS, LR, MOMENTUM = 3, 3, 0.1, 0.9
TOTAL, SHARD = 23, 8  # parameters of the model, which 3 does not divide
PART = (RANKS - 1) / RANKS  # of the whole row that a rank sends in half a ring
SENT = {  # {operation: numbers that a rank sends, per number of its last tensor}
    "all_reduce": 2 * PART, "reduce_scatter": RANKS * PART, "all_gather": RANKS * PART,
    "all_gather_into_tensor": RANKS * PART, "all_gather_single": RANKS * PART,
    "send": 1, "isend": 1, "recv": 0, "irecv": 0}


def points(file):
    """Yield (what, whether it is right, the hint if not), in the learner's order."""
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
    def on_rank(rank):
        model, optimizer = optimized(file)
        return (optimizer.begin, optimizer.end), state_bytes(optimizer, model)

    shards, sizes = zip(*on_ranks(file, on_rank, RANKS))
    yield f"the shards of {RANKS} ranks are all {TOTAL} parameters", list(shards) == [
        (rank * SHARD, (rank + 1) * SHARD) for rank in range(RANKS)], (
        f"{TOTAL} parameters, {RANKS} ranks, and rank by rank begin and end are {shards}: all "
        "shards have one length, rounded up, so that no parameter is left out")
    yield point_of_size("at the start", sizes)


def points_of_method(file, method, arguments, expected, rule):
    """arguments: what the method gets on each rank; expected: what it is to return there."""
    def on_rank(rank):
        calls = counted()
        _, optimizer = optimized(file)
        calls.clear()
        return getattr(optimizer, method)(arguments[rank].clone()), list(calls)

    results, calls = zip(*on_ranks(file, on_rank, RANKS))
    yield f"{method}: each rank gets what it has to", all(map(same, results, expected)), (
        f"each gets {rule}; rank 0 has {' '.join(str(results[0]).split())}")
    sent = sum(SENT.get(name, PART) * elements for name, elements, _ in calls[0])
    allowed = (RANKS - 1) * SHARD
    yield f"{method}: a rank sends no more than {allowed} numbers", sent <= allowed, (
        f"{', '.join(name for name, *_ in calls[0])}: {sent:.4g} numbers from a rank, where "
        f"{allowed} are enough")


def points_of_steps(file, gradients):
    """gradients[step][rank]: all numbers in a row."""
    def on_rank(rank):
        """Compare some steps with those of an optimizer that has the whole state."""
        model, optimizer = optimized(file)
        expected, velocity = flat(model.parameters()), torch.zeros(TOTAL, dtype=torch.float64)
        sizes, right = [parameter.numel() for parameter in model.parameters()], []
        for of_ranks in gradients:
            for parameter, part in zip(model.parameters(), of_ranks[rank].split(sizes)):
                parameter.grad = part.view_as(parameter).clone()
            optimizer.step()
            velocity = MOMENTUM * velocity + of_ranks.mean(0)
            expected = expected - LR * velocity
            right.append(same(flat(model.parameters()), expected))
        return right, state_bytes(optimizer, model)

    right, sizes = zip(*on_ranks(file, on_rank, RANKS))
    yield "each step is that of the optimizer with the whole state", all(map(all, right)), (
        f"right, step by step: {right[0]}; update changes own in place (own -= ...), and keeps "
        "velocity in self")
    yield point_of_size("at the end", sizes)


def optimized(file):
    """Return a model, the same on all ranks, and the learner's optimizer of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, learner(file).ShardedSGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def point_of_size(when, sizes):
    what = f"each rank's state is one shard, {8 * SHARD} bytes, {when}"
    return what, max(sizes) <= 8 * SHARD, (
        f"a rank has {max(sizes)} bytes, of all parameters it is {8 * TOTAL}; a view keeps all it "
        "was cut from")


def state_bytes(optimizer, model):
    """Return the bytes that the optimizer has besides parameters and gradients."""
    others = set()
    for parameter in model.parameters():
        others.add(parameter.untyped_storage().data_ptr())
        if parameter.grad is not None:
            others.add(parameter.grad.untyped_storage().data_ptr())
    storages = {}
    for leaf in tree_leaves(vars(optimizer)):
        if torch.is_tensor(leaf):
            storage = leaf.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for address, size in storages.items() if address not in others)
