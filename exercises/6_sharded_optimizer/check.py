"""What the grade of exercise 6 looks at."""

import sys
from pathlib import Path

import torch
from runner import counted, flat, learner, on_ranks, same
from torch import nn
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).resolve().parents[2] / "05_zero"))
from accounting import storages

RANKS, STEPS, LR, MOMENTUM = 3, 3, 0.1, 0.9
TOTAL, SHARD = 23, 8  # parameters of the model, which 3 does not divide
RING = {"all_reduce": 2 * (RANKS - 1) / RANKS, "reduce_scatter": RANKS - 1, "all_gather": RANKS - 1,
        "all_gather_into_tensor": RANKS - 1, "all_gather_single": RANKS - 1, "recv": 0, "irecv": 0}


def points(file):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    def optimized():
        """A model, the same on all ranks, and the learner's optimizer of it."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        return model, learner(file).ShardedSGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def making(rank):
        model, optimizer = optimized()
        return (optimizer.begin, optimizer.end), held(optimizer, model)
    shards, sizes = zip(*on_ranks(file, making, RANKS))
    yield f"the shards of {RANKS} ranks are all {TOTAL} parameters", list(shards) == [
        (rank * SHARD, (rank + 1) * SHARD) for rank in range(RANKS)], (
        f"{TOTAL} parameters, {RANKS} ranks, and rank by rank begin and end are {shards}: all shards have one length, "
        "rounded up, so that no parameter is left out")
    yield small("at the start", sizes)

    rows = torch.randn(RANKS, RANKS * SHARD, dtype=torch.float64)
    mean, whole = rows.mean(0), rows[:, :SHARD].flatten()
    for method, given, wanted, rule in [
            ("average", rows, mean.split(SHARD), f"its own shard of the mean, and the sum is {RANKS} times the mean"),
            ("gather", whole.split(SHARD), [whole] * RANKS, "all shards, one after the other, in the ranks' order")]:
        def calling(rank, method=method, given=given):
            calls = counted()
            _, optimizer = optimized()
            calls.clear()
            return getattr(optimizer, method)(given[rank].clone()), list(calls)
        got, calls = zip(*on_ranks(file, calling, RANKS))
        yield f"{method}: each rank gets what it has to", all(map(same, got, wanted)), (
            f"each gets {rule}; rank 0 has {' '.join(str(got[0]).split())}")
        sent, allowed = sum(RING.get(name, 1) * elements for name, elements, _ in calls[0]), (RANKS - 1) * SHARD
        yield f"{method}: a rank sends no more than {allowed} numbers", sent <= allowed, (
            f"{', '.join(name for name, *_ in calls[0])}: {sent:.4g} numbers from a rank, where {allowed} are enough")

    gradients = torch.randn(STEPS, RANKS, TOTAL, dtype=torch.float64)

    def stepping(rank):
        """Some steps, each from gradients of its own, beside those of an optimizer with the whole state."""
        model, optimizer = optimized()
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
    yield "the first step is that of the optimizer with the whole state", all(steps[0] for steps in right), (
        "the parameters are not those of PyTorch's SGD: update changes own in place (own -= ...), against the gradient")
    yield "and so are the next ones", all(map(all, right)), (
        "right in the first step, wrong later: velocity has to be kept in self, and times momentum in each step")
    yield small("at the end", sizes)


def small(when, sizes):
    return f"each rank's state is one shard, {8 * SHARD} bytes, {when}", max(sizes) <= 8 * SHARD, (
        f"a rank holds {max(sizes)} bytes beside parameters and gradients; the state of all parameters has {8 * TOTAL}, "
        "and a view keeps all that it was cut from")


def held(optimizer, model):
    """The bytes that the optimizer holds beside parameters and gradients."""
    values = [one if torch.is_tensor(one) else getattr(one, "__dict__", one) for one in vars(optimizer).values()]
    others = storages([one for parameter in model.parameters() for one in (parameter, parameter.grad)])
    found = storages(filter(torch.is_tensor, tree_leaves(values)))
    return sum(size for address, size in found.items() if address not in others)
