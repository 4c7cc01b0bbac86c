"""Checks for exercise 1: gradients averaged by hand."""

import torch
from runner import flat, load_exercise, on_ranks, record_calls, same
from torch import nn

RANKS = 3


def checks(file):
    """Yield (description, passed, hint) for each check, in the order of the work."""
    def on_rank(rank):
        calls = record_calls()
        exercise = load_exercise(file)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        model.unused = nn.Parameter(torch.randn(2).double())
        drawn = flat(model.parameters())
        exercise.equal_start(model)
        start = flat(model.parameters())
        model(torch.randn(5, 4).double()).square().sum().backward()
        own = flat(gradients(model))
        calls.clear()
        exercise.average_gradients(model)
        return {"drawn": drawn, "start": start, "own": own, "after": flat(gradients(model)),
                "calls": [name for name, *_ in calls]}

    ranks = on_ranks(file, on_rank, RANKS)
    yield "all ranks start with rank 0's parameters", all(
        same(rank["start"], ranks[0]["drawn"]) for rank in ranks), (
        "each rank draws its own weights; dist.broadcast(parameter.data, 0) overwrites them in "
        "place with rank 0's: pass parameter.data itself, not a copy")

    mean = sum(rank["own"] for rank in ranks) / RANKS
    after = ranks[0]["after"]
    yield "all ranks have the same gradients", all(same(rank["after"], after) for rank in ranks), (
        "dist.all_reduce(parameter.grad) sums the ranks' gradients in place, on every rank; called "
        "on a copy, it changes only the copy")
    factor = (after @ mean / (mean @ mean)).item()
    hint = ("this is not a multiple of the mean: broadcast, for example, keeps one rank's "
            "gradients and discards the others")
    if same(after, factor * mean):
        hint = (f"this is {factor:.3g} times the mean: all_reduce sums, so divide the result once "
                "by the number of ranks")
    yield "they are the mean of the ranks' gradients", same(after, mean), hint
    calls = ranks[0]["calls"]
    yield "each gradient is sent once", calls == ["all_reduce"] * 4, (
        f"average_gradients() calls {', '.join(calls)}; expected: one all_reduce for each of the 4 "
        "gradients")


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
