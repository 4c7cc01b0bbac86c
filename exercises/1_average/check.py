"""What the grade of exercise 1 looks at."""

import torch
from runner import counted, flat, learner, on_ranks, same
from torch import nn

RANKS = 3


def points(file):
    """Yield (what, whether it is right, the hint if not), in the learner's order."""
    def on_rank(rank):
        calls = counted()
        exercise = learner(file)
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
        "each rank draws weights of its own; dist.broadcast(parameter.data, 0) gives rank 0's to "
        "all, in place: a copy would not do")

    mean = sum(rank["own"] for rank in ranks) / RANKS
    after = ranks[0]["after"]
    yield "all ranks have the same gradients", all(same(rank["after"], after) for rank in ranks), (
        "dist.all_reduce(parameter.grad) adds up the ranks' gradients, in place on all ranks; of a "
        "copy it changes only the copy")
    factor = (after @ mean / (mean @ mean)).item()
    hint = ("that is no multiple of their mean: broadcast, for one, hands out one rank's, and the "
            "others' are lost")
    if same(after, factor * mean):
        hint = (f"that is {factor:.3g} times their mean: all_reduce makes the sum, and your lines "
                "divide it once, by the number of ranks")
    yield "they are the mean of the ranks' gradients", same(after, mean), hint
    calls = ranks[0]["calls"]
    yield "each gradient is sent once", calls == ["all_reduce"] * 4, (
        f"it calls {', '.join(calls)}: for 4 gradients 4 times all_reduce, which leaves the sum "
        "on every rank")


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
