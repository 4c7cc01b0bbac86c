"""Checks for exercise 6: a sharded optimizer."""

import torch
from runner import flatten, is_close, load_exercise, on_ranks, record_calls
from torch import nn

RANKS, STEPS, LR, MOMENTUM = 3, 3, 0.1, 0.9
TOTAL, SHARD = 23, 8  # parameters of the model, and of a shard after padding


def checks(file):
    yield from check_shards(file)
    torch.manual_seed(0)
    gradients = torch.randn(RANKS, RANKS * SHARD, dtype=torch.float64)
    shards = gradients.mean(0).split(SHARD)
    yield from check_method(file, "average", "reduce_scatter", gradients, shards, (
        f"this rank's shard of the mean (a plain sum would be {RANKS} times as large)"))
    yield from check_method(file, "gather", "all_gather", shards, [torch.cat(shards)] * RANKS, (
        "all shards, concatenated in rank order"))
    yield check_steps(file, torch.randn(STEPS, RANKS, TOTAL, dtype=torch.float64))


def check_shards(file):
    def run_exercise(rank):
        _, optimizer = build_model_and_optimizer(file)
        storage = optimizer.velocity.untyped_storage()  # a view has the whole tensor's
        return (optimizer.begin, optimizer.end), storage.nbytes()

    shards, sizes = zip(*on_ranks(file, run_exercise, RANKS))
    yield f"the shards of {RANKS} ranks cover all {TOTAL} parameters", list(shards) == [
        (rank * SHARD, (rank + 1) * SHARD) for rank in range(RANKS)], (
        f"(begin, end) of each rank: {shards}. All shards must have the same length, {TOTAL} / "
        f"{RANKS} rounded up, so that no parameter is left out")
    yield f"each rank's velocity is one shard, {8 * SHARD} bytes", max(sizes) == 8 * SHARD, (
        f"a rank's velocity takes {max(sizes)} bytes; for all parameters it would be {8 * TOTAL}, "
        "for a shard in fp32 half of what is expected")


def check_method(file, method, collective, arguments, expected, description):
    """Check one method. `arguments` and `expected` contain a tensor for each rank."""
    def run_exercise(rank):
        calls = record_calls()
        _, optimizer = build_model_and_optimizer(file)
        calls.clear()
        result = getattr(optimizer, method)(arguments[rank].clone())
        return result, [name for name, *_ in calls]

    results, calls = zip(*on_ranks(file, run_exercise, RANKS))
    yield f"{method}() returns the expected tensor", all(map(is_close, results, expected)), (
        f"expected: {description}; rank 0 has {' '.join(str(results[0]).split())}. A list of N "
        "tensors needs N tensors, not one of them N times")
    yield f"{method}() sends half of what an all_reduce sends", (
        len(calls[0]) == 1 and calls[0][0].startswith(collective)), (
        f"it calls {', '.join(calls[0])}; one {collective} is enough")


def check_steps(file, gradients):
    """Compare steps with those of an unsharded optimizer. gradients: (steps, ranks, elements)."""
    def run_exercise(rank):
        model, optimizer = build_model_and_optimizer(file)
        expected, velocity = flatten(model.parameters()), torch.zeros(TOTAL, dtype=torch.float64)
        sizes = [parameter.numel() for parameter in model.parameters()]
        for step_gradients in gradients:
            parts = step_gradients[rank].split(sizes)
            for parameter, part in zip(model.parameters(), parts):
                parameter.grad = part.view_as(parameter).clone()
            optimizer.step()
            velocity = MOMENTUM * velocity + step_gradients.mean(0)
            expected = expected - LR * velocity
        return is_close(flatten(model.parameters()), expected)

    passed = all(on_ranks(file, run_exercise, RANKS))
    return f"{STEPS} steps are those of an optimizer with unsharded state", passed, (
        "update() must change parameter_shard in place (-=) and keep the velocity in self")


def build_model_and_optimizer(file):
    """Return a model, equal on all ranks, and the learner's optimizer for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, load_exercise(file).ShardedSGD(model.parameters(), lr=LR, momentum=MOMENTUM)
