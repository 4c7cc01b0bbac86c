"""Run a learner's script on ranks, as its launcher would, and see what it does.

load_data, build_model and the constants are those of the scripts of exercises 3, 4 and 8.
"""

import functools
import os
import runpy
import sys
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it: here it is imported once for all ranks
import torch.distributed as dist
from runner import Points, counted, on_ranks, same
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import TensorDataset

torch.set_default_dtype(torch.float64)
BATCH, MOMENTUM = 64, 0.9


def load_data():
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images) / 16, torch.tensor(labels)
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def build_model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


# Running a script.

def by_torchrun(file: Path, ranks: int) -> list[dict]:
    """Return what the script did on each rank, started as torchrun does: see observe()."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's
    common = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    return run_script(file, [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)])


def run_script(file: Path, variables: list[dict], start: dict | None = None) -> list[dict]:
    """Return what the script did on each rank, with these variables; rank 0 has a start.pt."""
    def on_rank(rank):
        os.environ.update({name: str(value) for name, value in variables[rank].items()})
        sys.argv = [str(file)]
        if start and rank == 0:
            torch.save(start, "start.pt")
        return observe(file)
    return on_ranks(file, on_rank, len(variables), meet=False)


def observe(file):
    """Run a script on this rank. Return its batches, its parameters at start and end, and so on.

    "calls" are the names of the collectives, "saved" is what each file holds.
    """
    facts = {"batches": [], "printed": []}
    models, calls = [], counted()

    def before_forward(module, args):
        """The first module that is called in training is the model, wrapper and all."""
        if not module.training or not torch.is_grad_enabled():
            return
        if not models:
            models.append(module)
            facts["start"] = parameters(module)
        if module is models[0]:
            facts["batches"].append(args[0].detach().clone())

    def note_line(*words, **options):
        facts["printed"].append(" ".join(map(str, words)))
        print(*words, **options)

    register_module_forward_pre_hook(before_forward)
    dist.destroy_process_group = lambda *_: None  # gloo may abort if it goes before DDP
    runpy.run_path(str(file), {"print": note_line}, "__main__")
    if not models:
        raise RuntimeError("it has ended, and no model was trained: is main() called?")
    saved = [torch.load(path, weights_only=False)
             for path in Path().iterdir() if path.name != "start.pt"]
    names = [name for name, *_ in calls]
    return facts | {"calls": names, "end": parameters(models[0]), "saved": saved}


def parameters(model):
    return {name.removeprefix("module."): parameter.detach().clone()
            for name, parameter in model.named_parameters()}


def same_tensors(tensors: dict, expected: dict) -> bool:
    """Return True if both have the same names and, but for rounding, the same numbers."""
    return tensors.keys() == expected.keys() and all(
        same(tensors[name], expected[name]) for name in expected)


# The same training on one rank.

@functools.cache
def label_of():
    """Return {bytes of an image: its label}."""
    train, _ = load_data()
    return {image.numpy().tobytes(): label for image, label in zip(*train.tensors)}


def model_with(parameters: dict) -> nn.Module:
    model = build_model()
    model.load_state_dict(parameters)
    return model


def replay(start: dict, batches: list, rate: float, state: dict | None = None) -> list[dict]:
    """Return the parameters after each epoch of one rank with the batches of all ranks together.

    batches: those of each rank, in the order of the steps. state: of the optimizer.
    """
    model = model_with(start)
    optimizer = torch.optim.SGD(model.parameters(), rate, MOMENTUM)
    if state:
        optimizer.load_state_dict(state)
    after, steps = [], len(label_of()) // BATCH
    for number, parts in enumerate(zip(*batches), 1):
        optimizer.zero_grad()
        images = torch.cat(parts)
        labels = [label_of()[image.numpy().tobytes()] for image in images]
        cross_entropy(model(images), torch.stack(labels)).backward()
        optimizer.step()
        if number % steps == 0:
            after.append(parameters(model))
    return after


# What exercises 3 and 4 both ask.

def points_of_data(ranks: list[dict]) -> Points:
    share = len(label_of()) // len(ranks)  # of an epoch
    drawn = [{image.numpy().tobytes() for image in torch.cat(rank["batches"])[:share]}
             for rank in ranks]
    common = set.intersection(*drawn)
    yield "each rank trains on images of its own", len(common) < 0.05 * share, (
        "the loader of each rank goes through all images, or its sampler deals for others: after "
        "the ranks have met, a DistributedSampler deals the images out, in place of shuffle=True")
    sizes = [len(rank["batches"][0]) for rank in ranks]
    yield f"a step takes {BATCH} images, of all ranks together", sum(sizes) == BATCH, (
        f"it takes {' + '.join(map(str, sizes))} = {sum(sizes)}: what a rank's loader is given is "
        "its share of them")


def points_of_training(ranks: list[dict], rate: float, epochs: int, drift: str, hint: str,
                       state: dict | None = None) -> Points:
    """drift, hint: why ranks differ, and why they differ from one rank; state: of its optimizer."""
    yield "the ranks' parameters stay equal", all(
        same_tensors(rank["end"], ranks[0]["end"]) for rank in ranks), drift
    batches = [rank["batches"] for rank in ranks]
    steps = len(label_of()) // BATCH
    first, last = torch.cat(batches[0][:steps]), torch.cat(batches[0][-steps:])
    yield "each epoch has another order", not torch.equal(first, last), (
        "each epoch has the same order: the sampler shuffles by its seed and the number of the "
        "epoch, and was not told it")
    end = replay(ranks[0]["start"], batches, rate, state)[-1]
    yield "the training ends where one rank with these batches ends, to rounding", (
        same_tensors(ranks[0]["end"], end)), f"one rank ends elsewhere: {hint}"

    saving = [number for number, rank in enumerate(ranks) for _ in rank["saved"]]
    yield "one rank saves, one file", len(saving) == 1, (
        f"there are {len(saving)} files, of ranks {saving}: ranks that write one file at the same "
        "time may spoil it")
    content = ranks[saving[0]]["saved"][0]
    yield "what is saved loads into the plain model: its own names, the last parameters", (
        isinstance(content, dict) and same_tensors(content, end)), (
        "it is no state_dict of the plain model at the end; in the wrapper's every name begins "
        'with "module."')

    counts = [len(rank["printed"]) for rank in ranks]
    yield "one rank prints, each line once", sum(counts) == max(counts) == epochs + 1, (
        f"ranks print {' and '.join(map(str, counts))} lines, and one rank alone would print "
        f"{epochs + 1}")
    images, labels = load_data()[1].tensors
    right = model_with(end)(images).argmax(1) == labels
    accuracy = f"{right.double().mean().item():.4f}"
    line = next(rank["printed"][-1] for rank in ranks if rank["printed"])
    yield "the accuracy that is printed is that of all test images", accuracy in line, (
        f"all {len(labels)} together have {accuracy}, and the last line is: {line}")
