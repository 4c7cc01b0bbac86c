"""Checks for exercise 5: gradients accumulated over micro-batches."""

import copy

import torch
import torch._dynamo  # imported once for all ranks, because optimizers need it
from runner import flatten_gradients, is_close, load_exercise, on_ranks, record_calls
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS = 2, 2
EQUAL_SIZES, UNEQUAL_SIZES = [4, 4, 4], [4, 4, 2]  # images per micro-batch of a rank


def run_steps(exercise, calls, rank, sizes):
    """Call train_step() STEPS times. Yield a dict of what each call did."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, allreduce_hook)  # DDP's own, but visible to record_calls()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gradients, passes = [], []

    def note_passes(module, images, output):
        passes.append("F")
        output.register_hook(lambda _: passes.append("B"))

    model.register_forward_hook(note_passes)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(flatten_gradients(model)))
    for step in range(STEPS):
        torch.manual_seed(step)  # each rank makes all ranks' batches
        batches = [[(torch.randn(size, 6, dtype=torch.float64), torch.randint(4, (size,)))
                    for size in sizes] for _ in range(RANKS)]
        images = torch.cat([images for batch in batches for images, _ in batch])
        labels = torch.cat([labels for batch in batches for _, labels in batch])
        reference = copy.deepcopy(model)
        reference.zero_grad()
        cross_entropy(reference(images), labels).backward()
        gradients.clear()
        passes.clear()
        calls.clear()
        exercise.train_step(ddp, optimizer, batches[rank])
        optimizer_steps = len(gradients)
        gradients.append(flatten_gradients(model))  # in case there was no step
        times_sent = sum(elements for _, elements, _ in calls) / len(gradients[0])
        yield {"optimizer_steps": optimizer_steps, "times_sent": times_sent,
               "passes": "".join(passes),
               "gradient": gradients[0], "expected": flatten_gradients(reference)}


def checks(file):
    def run_exercise(rank):
        calls, exercise = record_calls(), load_exercise(file)
        return [list(run_steps(exercise, calls, rank, sizes))
                for sizes in (EQUAL_SIZES, UNEQUAL_SIZES)]

    results = on_ranks(file, run_exercise, RANKS)
    (first, second), unequal_steps = results[0]
    steps = first["optimizer_steps"]
    yield "one step after 3 micro-batches", steps == 1, (
        f"the optimizer made {steps} steps: add up the gradients of all micro-batches, "
        "then make one step")
    gradient, expected = first["gradient"], first["expected"]
    yield "all ranks step with the same gradient", all(
        is_close(equal_steps[0]["gradient"], gradient) for equal_steps, _ in results), (
        "no_sync() suppresses the all-reduce, and so does calling model instead of ddp; run the "
        "forward and backward of the last micro-batch outside no_sync()")
    yield "it is the gradient of the whole global batch", is_close(gradient, expected), (
        "each loss is a mean over one micro-batch, so divide by their number (DDP divides by the "
        "number of ranks); zero_grad between micro-batches discards what was accumulated")
    yield "and so is that of the next step", is_close(second["gradient"], second["expected"]), (
        "backward() adds to .grad, which may still have the previous step's gradient: begin each "
        "step with zero_grad")
    yield "the gradients are sent once", first["times_sent"] == 1, (
        f"they were sent {first['times_sent']:.3g} times: under ddp.no_sync() nothing is sent; DDP "
        "decides during the forward pass, so that must be inside no_sync(), too")
    yield "each micro-batch's backward comes before the next forward", (
        first["passes"] == "FB" * len(EQUAL_SIZES)), (
        f"the passes are {first['passes']}, F forward, B backward: until its backward a micro-"
        "batch needs memory for its activations, so call backward() for each loss, not for their "
        "sum")
    yield "the gradient is correct with a smaller last micro-batch", all(
        is_close(step["gradient"], step["expected"]) for step in unequal_steps), (
        f"if micro-batches of {UNEQUAL_SIZES} images get equal weight, each image of the last one "
        "counts twice")
