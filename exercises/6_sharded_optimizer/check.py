"""Checks for exercise 6: a sharded optimizer."""

import torch
from runner import flat, load_exercise, on_ranks, record_calls, same
from torch import nn

RANKS, STEPS, LR, MOMENTUM = 3, 3, 0.1, 0.9
TOTAL, SHARD = 23, 8  # parameters of the model and of a shard; 23 is no multiple of 3


def checks(file):
    """Yield (description, passed, hint) for each check, in the order of the work."""
    yield from check_shards(file)
    torch.manual_seed(0)
    rows = torch.randn(RANKS, RANKS * SHARD, dtype=torch.float64)
    mean, whole = rows.mean(0), rows[:, :SHARD].flatten()
    yield from check_method(file, "average", "reduce_scatter", rows, mean.split(SHARD), (
        f"this rank's shard of the mean (a plain sum would be {RANKS} times as large)"))
    yield from check_method(file, "gather", "all_gather", whole.split(SHARD), [whole] * RANKS, (
        "all shards, concatenated in rank order"))
    yield check_steps(file, torch.randn(STEPS, RANKS, TOTAL, dtype=torch.float64))


def check_shards(file):
    def on_rank(rank):
        _, optimizer = build_model_and_optimizer(file)
        state = optimizer.velocity.untyped_storage().nbytes()  # a view would count its whole base
        return (optimizer.begin, optimizer.end), state

    shards, sizes = zip(*on_ranks(file, on_rank, RANKS))
    yield f"the shards of {RANKS} ranks cover all {TOTAL} parameters", list(shards) == [
        (rank * SHARD, (rank + 1) * SHARD) for rank in range(RANKS)], (
        f"(begin, end) of each rank: {shards}. All shards must have the same length, {TOTAL} / "
        f"{RANKS} rounded up, so that no parameter is left out")
    yield f"each rank's velocity is one shard, {8 * SHARD} bytes", max(sizes) == 8 * SHARD, (
        f"a rank's velocity takes {max(sizes)} bytes; for all parameters it would be {8 * TOTAL}")


def check_method(file, method, collective, arguments, expected, rule):
    """arguments, expected: one for each rank."""
    def on_rank(rank):
        calls = record_calls()
        _, optimizer = build_model_and_optimizer(file)
        calls.clear()
        result = getattr(optimizer, method)(arguments[rank].clone())
        return result, [name for name, *_ in calls]

    results, calls = zip(*on_ranks(file, on_rank, RANKS))
    yield f"{method}() returns the expected tensor", all(map(same, results, expected)), (
        f"expected: {rule}; rank 0 has {' '.join(str(results[0]).split())}")
    yield f"{method}() sends half of what an all_reduce sends", (
        len(calls[0]) == 1 and calls[0][0].startswith(collective)), (
        f"it calls {', '.join(calls[0])}; one {collective} is enough")


def check_steps(file, gradients):
    """gradients[step][rank]: one flat tensor."""
    def on_rank(rank):
        """Compare some steps with those of an optimizer with unsharded state."""
        model, optimizer = build_model_and_optimizer(file)
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
    return f"{STEPS} steps are those of an optimizer with unsharded state", right, (
        "update() must change parameter_shard in place (-=) and keep the velocity in self")


def build_model_and_optimizer(file):
    """Return a model, equal on all ranks, and the learner's optimizer for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, load_exercise(file).ShardedSGD(model.parameters(), lr=LR, momentum=MOMENTUM)
