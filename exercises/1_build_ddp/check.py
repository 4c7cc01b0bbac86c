"""Checks for exercise 1: DistributedDataParallel, in four steps."""

import copy

import slow_link
import torch
from runner import flatten, flatten_gradients, is_close, load_exercise, on_ranks
from torch import nn

RANKS, STEPS, BUCKET_BYTES = 3, 3, 280
SIZES = [240, 40, 200, 40, 200, 40, 160, 32]  # bytes of build_model()'s parameters
BUCKETS = [432, 280, 240]  # of them, from the last to the first
LAYERS, WIDTH, BATCH = 8, 384, 1024  # for the timed network
TIMED_BUCKET_BYTES = 1_000_000
CLASSES = "PerParameter", "Flat", "Overlapped", "Bucketed"
MEAN_HINT = (
    "all_reduce changes its tensor in place, on every rank, to the sum: divide once by the number "
    "of ranks, after the handle's wait(). What is flattened has to be copied back into each .grad")
CALLS = {  # class: what it must send, and a hint
    "PerParameter": ("each gradient is sent once, after backward", "call all_reduce in finish()"),
    "Flat": ("all gradients are sent at once, after backward",
             "flatten the gradients into one vector, all-reduce it, and copy it back"),
    "Overlapped": ("each gradient is sent during backward, without waiting",
                   "start() calls all_reduce with async_op=True, and returns without wait()"),
    "Bucketed": (f"{len(BUCKETS)} buckets are sent during backward, without waiting",
                 "go from the last parameter to the first, and close a bucket with the parameter "
                 f"that brings it to {BUCKET_BYTES} bytes or more. start() sends a bucket as soon "
                 "as none of its gradients is missing, with async_op=True")}


def build_model():
    """Return a model whose parameters have SIZES."""
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(),
                         nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def checks(file):
    yield from check_copy(file)
    print("  (F forward, B backward, A finish(), . waiting, = sending: "
          f"{slow_link.BANDWIDTH / 1e9} GB/s, {1e3 * slow_link.LATENCY:.0f} ms per collective)")
    scale = None
    for name in CLASSES:
        yield from check_class(file, name)
        scale = slow_link.time_step(
            file, lambda name=name: make_step(file, name), name, scale)


def check_copy(file):
    def run_exercise(rank):
        model = build_model()
        parameters = flatten(model.parameters())
        load_exercise(file).copy_parameters(model)
        return parameters, flatten(model.parameters())

    results = on_ranks(file, run_exercise, RANKS)
    yield "all ranks start with rank 0's parameters", all(
        is_close(parameters, results[0][0]) for _, parameters in results), (
        "each rank draws its own weights; dist.broadcast(parameter.data, 0) overwrites them in "
        "place with rank 0's: pass parameter.data itself, not a copy")


def make_averager(file, name, model, bucket_bytes):
    arguments = [bucket_bytes] if name == "Bucketed" else []
    return getattr(load_exercise(file), name)(model, *arguments)


def check_class(file, name):
    def run_exercise(rank):
        """Return, for each step, this rank's own and averaged gradients, and the recorded step."""
        slow_link.slow_down()
        torch.manual_seed(0)
        model = build_model()
        one_rank = copy.deepcopy(model)
        averager = make_averager(file, name, model, BUCKET_BYTES)
        results = []
        for _ in range(STEPS):
            batches = torch.randn(RANKS, 5, 6, dtype=torch.float64)
            one_rank.zero_grad()
            one_rank(batches.flatten(0, 1)).square().mean().backward()
            recorded = slow_link.record_step(lambda step, batch=batches[rank]: train_step(
                step, model, averager, batch))
            results.append((flatten_gradients(model), flatten_gradients(one_rank), recorded))
            model.zero_grad()
        return results

    results = on_ranks(file, run_exercise, RANKS)
    for number, description in enumerate(("first", "second", "third")):
        passed = all(is_close(steps[number][0], steps[number][1]) for steps in results)
        yield f"{name}: the {description} step's gradients are those of one rank", passed, (
            MEAN_HINT if number == 0 else "the first step was right: which lists or counts does "
            "finish() have to reset for the next one?")
    for number, when in ((0, ""), (-1, ", in the last step, too")):
        _, _, recorded = results[0][number]
        yield from check_sending(name, recorded, when)


def check_sending(name, recorded, when):
    """Check what a class has sent in a step, and when."""
    description, hint = CALLS[name]
    backward_end = next(begin for letter, begin in recorded.phases if letter == "A")
    sizes = [transfer.bytes for transfer in recorded.transfers]
    if name == "Flat":
        passed = sizes == [sum(BUCKETS)]
    else:
        passed = sizes == BUCKETS if name == "Bucketed" else sorted(sizes) == sorted(SIZES)
    during_backward = [transfer.issued < backward_end for transfer in recorded.transfers]
    early_waits = [begin for begin, _ in recorded.waits if begin < backward_end]
    if name in ("PerParameter", "Flat"):
        passed &= not any(during_backward)
    else:
        passed &= all(during_backward) and not early_waits
    yield f"{name}: {description}{when}", passed, (
        f"it sends {sizes} bytes, {sum(during_backward)} of {len(sizes)} during backward, and "
        f"waits {len(early_waits)} times during backward; {hint}")


def train_step(step, model, averager, batch):
    step.begin_phase("F")
    loss = model(batch).square().mean()
    step.begin_phase("B")
    loss.backward()
    step.begin_phase("A")
    averager.finish()


def make_step(file, name):
    """Return a function that makes a step of a larger network."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    averager = make_averager(file, name, model, TIMED_BUCKET_BYTES)
    batch = torch.randn(BATCH, WIDTH)
    return lambda step: train_step(step, model, averager, batch)
