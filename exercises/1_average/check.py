"""What the grade of exercise 1 looks at."""

import torch
from runner import counted, learner, on_ranks
from torch import nn

RANKS = 3


class Model(nn.Module):
    """Four tensors with gradients, and two that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.second = nn.Linear(4, 3), nn.Linear(2, 2), nn.Linear(3, 2)

    def forward(self, batch):
        return self.second(self.first(batch).tanh())


def watch(file):
    """Per rank: parameters, own gradients and what the learner makes of them, and what was communicated."""
    def on_rank(rank):
        calls = counted()
        exercise = learner(file)
        model = Model().double()
        drawn = flat(model.parameters())
        exercise.equal_start(model)
        start, starting = flat(model.parameters()), len(calls)
        model(torch.randn(5, 4).double()).square().sum().backward()
        own = flat(gradients(model))
        exercise.average_gradients(model)
        return {"drawn": drawn, "start": start, "starting": starting, "own": own, "after": flat(gradients(model)),
                "end": flat(model.parameters()), "averaging": calls[starting:]}
    return on_ranks(file, on_rank, RANKS)


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).clone()


def same(one, other):
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def points(facts):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    first, ranks = facts[0], len(facts)
    starts = [fact["start"] for fact in facts]
    hint = "each rank draws weights of its own; dist.broadcast(tensor, 0) gives rank 0's to all, in place"
    if all(same(fact["start"], fact["drawn"]) for fact in facts):
        hint = "the parameters are what they were: change them in place (parameter.data), not a copy"
    if all(same(start, sum(fact["drawn"] for fact in facts) / ranks) for start in starts):
        hint = "that is the mean of the ranks' parameters: equal, but no longer what rank 0 has drawn; send rank 0's"
    yield "all ranks start with rank 0's parameters", all(same(start, first["drawn"]) for start in starts), hint

    mean = sum(fact["own"] for fact in facts) / ranks
    after = [fact["after"] for fact in facts]
    hint = "dist.all_reduce(parameter.grad) adds up all ranks' gradients, in place"
    if all(same(fact["after"], fact["own"]) for fact in facts):
        hint = "each rank has its own gradients still: nothing was sent, or it went elsewhere than into parameter.grad"
    elif not any(same(fact["after"], fact["own"]) for fact in facts) and any(
            torch.isclose(fact["after"], fact["own"]).any() for fact in facts):
        hint = "some gradients are averaged, others are each rank's own still: is every parameter's reached?"
    elif same(after[0], mean) or same(after[0], mean * ranks):
        hint = "only rank 0 has it: reduce brings the sum to one rank, all_reduce to all"
    yield "all ranks have the same gradients", all(same(one, after[0]) for one in after), hint

    hint = "neither their mean nor their sum: is every parameter's gradient averaged, weights and biases?"
    factor = (after[0] @ mean / (mean @ mean)).item()
    if same(after[0], mean * ranks):
        hint = f"that is their sum, {ranks} times the mean: what is left to do, in place, to parameter.grad?"
    elif same(after[0], mean / ranks):
        hint = f"{ranks} times too small: divided twice"
    elif any(same(after[0], fact["own"]) for fact in facts):
        hint = "all have one rank's gradients: broadcast hands out one rank's, and the others' images are lost"
    elif same(after[0], mean * factor):
        hint = f"that is {factor:.3g} times their mean: there are {ranks} ranks here, and elsewhere others"
    yield "they are the mean of the ranks' gradients", same(after[0], mean), hint
    yield "the parameters are untouched by it", all(same(fact["end"], fact["start"]) for fact in facts), (
        "average parameter.grad, not parameter.data: the optimizer moves the parameters")

    needed = sum(fact[0] == "all_reduce" for fact in first["averaging"])
    extra = [name for name, *_ in first["averaging"] if name != "all_reduce"]
    yield "each gradient is sent once", not extra and needed == 4, (
        f"beside the all-reduces there is {extra[0]}: all_reduce alone leaves the result on every rank" if extra else
        f"{needed} all-reduces for 4 gradients")
