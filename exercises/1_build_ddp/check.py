"""Checks for exercise 1: gradients averaged by hand."""

import torch
from runner import flatten, flatten_gradients, is_close, load_exercise, on_ranks, record_calls
from torch import nn

RANKS = 3


def checks(file):
    results = on_ranks(file, lambda rank: run_exercise(file), RANKS)
    initial = results[0]["initial_parameters"]
    yield "all ranks start with rank 0's parameters", all(
        is_close(result["parameters"], initial) for result in results), (
        "each rank draws its own weights; dist.broadcast(parameter.data, 0) overwrites them in "
        "place with rank 0's: pass parameter.data itself, not a copy")

    mean = sum(result["rank_gradients"] for result in results) / RANKS
    gradients = results[0]["gradients"]
    are_equal = all(is_close(result["gradients"], gradients) for result in results)
    yield "all ranks have the same gradients", are_equal, (
        "dist.all_reduce(parameter.grad) sums the ranks' gradients in place, on every rank; called "
        "on a copy, it changes only the copy")
    yield "they are the mean of the ranks' gradients", is_close(gradients, mean), (
        "all_reduce sums, so divide the result once by the number of ranks; broadcast keeps one "
        "rank's gradients and discards the others")
    calls = results[0]["calls"]
    yield "each gradient is sent once", calls == ["all_reduce"] * 4, (
        f"average_gradients() calls {', '.join(calls)}; expected: one all_reduce for each of the 4 "
        "gradients")


def run_exercise(file):
    """Return this rank's parameters and gradients, before and after the learner's functions."""
    calls, exercise = record_calls(), load_exercise(file)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    model.unused = nn.Parameter(torch.randn(2).double())
    initial_parameters = flatten(model.parameters())
    exercise.synchronize_parameters(model)
    parameters = flatten(model.parameters())
    model(torch.randn(5, 4).double()).square().sum().backward()
    rank_gradients = flatten_gradients(model)
    calls.clear()
    exercise.average_gradients(model)
    return {"initial_parameters": initial_parameters, "parameters": parameters,
            "rank_gradients": rank_gradients, "gradients": flatten_gradients(model),
            "calls": [name for name, *_ in calls]}
