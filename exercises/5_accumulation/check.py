"""What the grade of exercise 5 looks at."""

import copy

import torch
import torch._dynamo  # optimizers import it: here it is imported once for all ranks
from runner import counted, flat, learner, on_ranks, same
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS = 2, 2
EQUAL, UNEQUAL = [4, 4, 4], [4, 4, 2]  # images of each micro-batch of a rank


def run_steps(exercise, calls, rank, sizes):
    """Yield the facts of each call of train_step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, allreduce_hook)  # as DDP itself, but where counted() sees it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    taken = []
    optimizer.register_step_pre_hook(lambda *_: taken.append(gradient(model)))
    for step in range(STEPS):
        torch.manual_seed(step)  # the batches of all ranks, on each of them
        batches = [[(torch.randn(size, 6, dtype=torch.float64), torch.randint(4, (size,)))
                    for size in sizes] for _ in range(RANKS)]
        whole = copy.deepcopy(model)
        whole.zero_grad()
        pairs = [pair for of_rank in batches for pair in of_rank]
        images, labels = (torch.cat(parts) for parts in zip(*pairs))
        cross_entropy(whole(images), labels).backward()
        taken.clear()
        calls.clear()
        exercise.train_step(ddp, optimizer, batches[rank])
        sent = sum(elements for _, elements, _ in calls) / len(gradient(model))
        yield {"steps": len(taken), "sent": sent, "gradient": [*taken, gradient(model)][0],
               "expected": gradient(whole)}


def gradient(model):
    return flat(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in model.parameters())


def points(file):
    """Yield (what, whether it is right, the hint if not), in the learner's order."""
    def on_rank(rank):
        calls = counted()
        exercise = learner(file)
        return [list(run_steps(exercise, calls, rank, sizes)) for sizes in (EQUAL, UNEQUAL)]

    equal, unequal = zip(*on_ranks(file, on_rank, RANKS))
    first = equal[0][0]
    yield "one step after 3 micro-batches", first["steps"] == 1, (
        f"it is {first['steps']} steps: gradients are added up over all micro-batches, and then "
        "comes one step")
    taken, expected = first["gradient"], first["expected"]
    yield "all ranks step with the same gradient", all(
        same(rank[0]["gradient"], taken) for rank in equal), (
        "under no_sync nothing is sent, nor of a model that is called without its wrapper; the "
        "last micro-batch, forward and backward, is to send all that was added up")
    factor = (taken @ expected / (expected @ expected)).item()
    hint = ("it is no multiple of the right one: zero_grad between micro-batches, for one, throws "
            "away what was added up")
    if same(taken, factor * expected):
        hint = (f"it is {factor:.4g} times the right one: each loss is a mean over one "
                "micro-batch, so your lines divide by their number; DDP divides by the number of "
                "ranks")
    yield "it is the gradient of the whole global batch", same(taken, expected), hint
    yield "and in the next step", same(equal[0][1]["gradient"], equal[0][1]["expected"]), (
        "backward() adds to .grad, where the last step's gradient may be still: begin each step "
        "with zero_grad")
    yield "the gradients are sent once", first["sent"] == 1, (
        f"they were sent {first['sent']:.3g} times: under ddp.no_sync() nothing is sent; DDP "
        "decides in the forward")
    yield "the same with a smaller last micro-batch", all(
        same(step["gradient"], step["expected"]) for step in unequal[0]), (
        f"of micro-batches of {UNEQUAL} that count a third each, the last one's images count "
        "twice as much")
