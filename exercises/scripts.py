"""Run a learner's script on ranks, as its launcher would, and record what it does.

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
from runner import Checks, on_ranks, record_calls, same
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
    """Return observe() of each rank, started as torchrun does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's
    common = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    return run_script(file, [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)])


def run_script(file: Path, variables: list[dict], start: dict | None = None) -> list[dict]:
    """Return observe() of each rank, run with these environment variables.

    If `start` is given, rank 0 finds it as start.pt.
    """
    def on_rank(rank):
        os.environ.update({name: str(value) for name, value in variables[rank].items()})
        sys.argv = [str(file)]
        if start and rank == 0:
            torch.save(start, "start.pt")
        return observe(file)
    return on_ranks(file, on_rank, len(variables), init_group=False)


def observe(file):
    """Run a script on this rank. Return a dict of what it did.

    "batches": inputs of each step; "printed": lines; "calls": names of the collectives;
    "start", "end": the parameters; "saved": the content of each saved file.
    """
    facts = {"batches": [], "printed": []}
    models, calls = [], record_calls()

    def before_forward(module, args):
        """Treat the first module called in training mode as the model (possibly wrapped)."""
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
    dist.destroy_process_group = lambda *_: None  # gloo may abort if destroyed before DDP
    runpy.run_path(str(file), {"print": note_line}, "__main__")
    if not models:
        raise RuntimeError("the script ended without training a model: is main() called?")
    saved = [torch.load(path, weights_only=False)
             for path in Path().iterdir() if path.name != "start.pt"]
    names = [name for name, *_ in calls]
    return facts | {"calls": names, "end": parameters(models[0]), "saved": saved}


def parameters(model):
    return {name.removeprefix("module."): parameter.detach().clone()
            for name, parameter in model.named_parameters()}


def same_tensors(tensors: dict, expected: dict) -> bool:
    """Return True if both have the same names and, up to rounding, equal values."""
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
    """Return the parameters after each epoch of a one-rank training on all ranks' batches.

    batches: one list per rank, in the order of the steps; state: the optimizer's.
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


# Checks shared by exercises 3 and 4.

def check_data(ranks: list[dict]) -> Checks:
    share = len(label_of()) // len(ranks)  # images per rank and epoch
    drawn = [{image.numpy().tobytes() for image in torch.cat(rank["batches"])[:share]}
             for rank in ranks]
    common = set.intersection(*drawn)
    yield "each rank trains on different images", len(common) < 0.05 * share, (
        "each rank's loader goes through all images, or its sampler has the wrong number of ranks: "
        "create a DistributedSampler after the process group, and drop shuffle=True")
    sizes = [len(rank["batches"][0]) for rank in ranks]
    yield f"a step takes {BATCH} images over all ranks", sum(sizes) == BATCH, (
        f"it takes {' + '.join(map(str, sizes))} = {sum(sizes)}: divide the loader's batch "
        "size by the number of ranks")


def check_training(ranks: list[dict], rate: float, epochs: int, drift: str, hint: str,
                       state: dict | None = None) -> Checks:
    """drift: hint if ranks differ; hint: if they differ from one rank; state: the optimizer's."""
    yield "the ranks' parameters stay equal", all(
        same_tensors(rank["end"], ranks[0]["end"]) for rank in ranks), drift
    batches = [rank["batches"] for rank in ranks]
    steps = len(label_of()) // BATCH
    first, last = torch.cat(batches[0][:steps]), torch.cat(batches[0][-steps:])
    yield "the order changes every epoch", not torch.equal(first, last), (
        "each epoch has the same order: the sampler shuffles by its seed and the epoch's number; "
        "call sampler.set_epoch(epoch)")
    end = replay(ranks[0]["start"], batches, rate, state)[-1]
    yield "the result is that of one rank with the same batches, up to rounding", (
        same_tensors(ranks[0]["end"], end)), f"the result differs from a one-rank run: {hint}"

    saving = [number for number, rank in enumerate(ranks) for _ in rank["saved"]]
    yield "only one rank saves the model", len(saving) == 1, (
        f"there are {len(saving)} files, from ranks {saving}: ranks that write the same file at "
        "the same time may corrupt it")
    content = ranks[saving[0]]["saved"][0]
    yield "the saved state_dict loads into the plain model and has its final parameters", (
        isinstance(content, dict) and same_tensors(content, end)), (
        "it is not the plain model's final state_dict; in the wrapper's, every name begins with "
        '"module."')

    counts = [len(rank["printed"]) for rank in ranks]
    yield "each line is printed once, by one rank", sum(counts) == max(counts) == epochs + 1, (
        f"the ranks print {' and '.join(map(str, counts))} lines; expected: {epochs + 1} from one "
        "rank")
    images, labels = load_data()[1].tensors
    right = model_with(end)(images).argmax(1) == labels
    accuracy = f"{right.double().mean().item():.4f}"
    line = next(rank["printed"][-1] for rank in ranks if rank["printed"])
    yield "the printed accuracy is that of all test images", accuracy in line, (
        f"the accuracy over all {len(labels)} images is {accuracy}, but the last line printed is: "
        f"{line}")
