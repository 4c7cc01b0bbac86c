"""Checks for exercise 5: gradients accumulated over micro-batches."""

import copy

import torch
import torch._dynamo  # optimizers import it: here it is imported once for all ranks
from runner import flat, load_exercise, on_ranks, record_calls, same
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS = 2, 2
EQUAL, UNEQUAL = [4, 4, 4], [4, 4, 2]  # images per micro-batch of a rank


def run_steps(exercise, calls, rank, sizes):
    """Call train_step() STEPS times; yield what each call did."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, allreduce_hook)  # DDP's own, but visible to record_calls()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    taken = []
    optimizer.register_step_pre_hook(lambda *_: taken.append(gradient(model)))
    for step in range(STEPS):
        torch.manual_seed(step)  # each rank makes all ranks' batches
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


def checks(file):
    """Yield (description, passed, hint) for each check, in the order of the work."""
    def on_rank(rank):
        calls = record_calls()
        exercise = load_exercise(file)
        return [list(run_steps(exercise, calls, rank, sizes)) for sizes in (EQUAL, UNEQUAL)]

    equal, unequal = zip(*on_ranks(file, on_rank, RANKS))
    first = equal[0][0]
    yield "one step after 3 micro-batches", first["steps"] == 1, (
        f"the optimizer made {first['steps']} steps: add up the gradients of all micro-batches, "
        "then make one step")
    taken, expected = first["gradient"], first["expected"]
    yield "all ranks step with the same gradient", all(
        same(rank[0]["gradient"], taken) for rank in equal), (
        "no_sync() suppresses the all-reduce, and so does calling model instead of ddp; run the "
        "forward and backward of the last micro-batch outside no_sync()")
    factor = (taken @ expected / (expected @ expected)).item()
    hint = ("it is not a multiple of the right one: zero_grad between micro-batches, for example, "
            "discards what was accumulated")
    if same(taken, factor * expected):
        hint = (f"it is {factor:.4g} times the right one: each loss is a mean over one "
                "micro-batch, so divide by their number; DDP divides by the number of ranks")
    yield "it is the gradient of the whole global batch", same(taken, expected), hint
    yield "so it is in the next step", same(equal[0][1]["gradient"], equal[0][1]["expected"]), (
        "backward() adds to .grad, which may still have the previous step's gradient: begin each "
        "step with zero_grad")
    yield "the gradients are sent once", first["sent"] == 1, (
        f"they were sent {first['sent']:.3g} times: under ddp.no_sync() nothing is sent; DDP "
        "decides during the forward pass, so that must be inside no_sync(), too")
    yield "the gradient is right with a smaller last micro-batch", all(
        same(step["gradient"], step["expected"]) for step in unequal[0]), (
        f"if micro-batches of {UNEQUAL} images get equal weight, each image of the last one counts "
        "twice")
