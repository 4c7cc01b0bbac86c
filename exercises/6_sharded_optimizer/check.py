"""What the grade of exercise 6 looks at."""

import torch
from runner import counted, flat, learner, on_ranks, same
from torch import nn

RANKS, STEPS, LR, MOMENTUM = 3, 3, 0.1, 0.9
TOTAL, SHARD = 23, 8  # parameters of the model, which 3 does not divide


def points(file):
    """Yield (what, whether it is right, the hint if not), in the learner's order."""
    yield from points_of_shards(file)
    torch.manual_seed(0)
    rows = torch.randn(RANKS, RANKS * SHARD, dtype=torch.float64)
    mean, whole = rows.mean(0), rows[:, :SHARD].flatten()
    yield from points_of_method(file, "average", "reduce_scatter", rows, mean.split(SHARD), (
        f"its own shard of the mean, and the sum is {RANKS} times the mean"))
    yield from points_of_method(file, "gather", "all_gather", whole.split(SHARD), [whole] * RANKS, (
        "all shards, one after the other, in the ranks' order"))
    yield point_of_steps(file, torch.randn(STEPS, RANKS, TOTAL, dtype=torch.float64))


def points_of_shards(file):
    def on_rank(rank):
        _, optimizer = optimized(file)
        state = optimizer.velocity.untyped_storage().nbytes()  # of a view: all it was cut from
        return (optimizer.begin, optimizer.end), state

    shards, sizes = zip(*on_ranks(file, on_rank, RANKS))
    yield f"the shards of {RANKS} ranks are all {TOTAL} parameters", list(shards) == [
        (rank * SHARD, (rank + 1) * SHARD) for rank in range(RANKS)], (
        f"{TOTAL} parameters, {RANKS} ranks, and rank by rank begin and end are {shards}: all "
        "shards have one length, rounded up, so that no parameter is left out")
    yield f"each rank's velocity is one shard, {8 * SHARD} bytes", max(sizes) == 8 * SHARD, (
        f"a rank has {max(sizes)} bytes, of all parameters it is {8 * TOTAL}")


def points_of_method(file, method, collective, arguments, expected, rule):
    """arguments: what the method gets on each rank; expected: what it is to return there."""
    def on_rank(rank):
        calls = counted()
        _, optimizer = optimized(file)
        calls.clear()
        result = getattr(optimizer, method)(arguments[rank].clone())
        return result, [name for name, *_ in calls]

    results, calls = zip(*on_ranks(file, on_rank, RANKS))
    yield f"{method}: each rank gets what it has to", all(map(same, results, expected)), (
        f"each gets {rule}; rank 0 has {' '.join(str(results[0]).split())}")
    yield f"{method}: a rank sends half of what an all_reduce sends", (
        len(calls[0]) == 1 and calls[0][0].startswith(collective)), (
        f"it calls {', '.join(calls[0])}, where one {collective} is enough")


def point_of_steps(file, gradients):
    """gradients[step][rank]: all numbers in a row."""
    def on_rank(rank):
        """Compare some steps with those of an optimizer that has the whole state."""
        model, optimizer = optimized(file)
        expected, velocity = flat(model.parameters()), torch.zeros(TOTAL, dtype=torch.float64)
        sizes = [parameter.numel() for parameter in model.parameters()]
        for of_ranks in gradients:
            for parameter, part in zip(model.parameters(), of_ranks[rank].split(sizes)):
                parameter.grad = part.view_as(parameter).clone()
            optimizer.step()
            velocity = MOMENTUM * velocity + of_ranks.mean(0)
            expected = expected - LR * velocity
        return same(flat(model.parameters()), expected)

    right = all(on_ranks(file, on_rank, RANKS))
    return f"{STEPS} steps are those of the optimizer with the whole state", right, (
        "update changes own in place (own -= ...), and keeps velocity in self")


def optimized(file):
    """Return a model, the same on all ranks, and the learner's optimizer of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, learner(file).ShardedSGD(model.parameters(), lr=LR, momentum=MOMENTUM)
