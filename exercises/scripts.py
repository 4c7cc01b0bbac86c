"""Run a learner's script on ranks, as torchrun would, and record what it does."""

import functools
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch._dynamo  # imported once for all ranks, because optimizers need it
import torch.distributed as dist
from digits import build_model, load_data
from runner import is_close, on_ranks, record_calls
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_pre_hook

torch.set_default_dtype(torch.float64)
BATCH, MOMENTUM = 64, 0.9  # of exercises 3 and 8


def observe(file: Path) -> dict:
    """Run a script on this rank. Return what it did.

    "batches", "parameters": the images of each step, the parameters before it; "end": those after
    the last step; "lines": the output; "calls": names of dist's functions.
    """
    result = {"batches": [], "parameters": [], "lines": []}
    models, calls = [], record_calls()

    def before_forward(module, args):
        """Record a step of the first module that trains: the model, or its wrapper."""
        if not module.training or not torch.is_grad_enabled():
            return
        if not models:
            models.append(module)
        if module is models[0]:
            result["batches"].append(args[0].detach().clone())
            result["parameters"].append(parameters(module))

    def record_line(*args, **kwargs):
        result["lines"].append(" ".join(map(str, args)))
        print(*args, **kwargs)

    register_module_forward_pre_hook(before_forward)
    dist.destroy_process_group = lambda *_: None  # gloo may abort if DDP still uses it
    with suppress(SystemExit):
        runpy.run_path(str(file), {"print": record_line}, "__main__")
    if not models:
        raise RuntimeError("the script ended without training a model: is main() called?")
    return result | {"calls": [name for name, *_ in calls], "end": parameters(models[0])}


def run_with_torchrun(file: Path, ranks: int, prepare: Callable[[], dict] = dict) -> list[dict]:
    """Run the script with the variables that torchrun sets. Return what each rank did.

    That is observe(file), "saved", the content of each file in the rank's own folder, and the dict
    that `prepare` returns, which each rank calls first.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}

    def run_rank(rank):
        variables = common | {"RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in variables.items()})
        sys.argv = [str(file)]
        folder = Path.cwd()
        result = prepare() | observe(file)
        saved = [torch.load(path, weights_only=False) for path in folder.iterdir()]
        return result | {"saved": saved}
    return on_ranks(file, run_rank, ranks, backend=None)


def parameters(model):
    return {name.removeprefix("module."): parameter.detach().clone()
            for name, parameter in model.named_parameters()}


def same_tensors(tensors: dict, expected: dict) -> bool:
    """Return True if both have the same names and, up to rounding, equal values."""
    return tensors.keys() == expected.keys() and all(
        is_close(tensors[name], expected[name]) for name in expected)


@functools.cache
def labels_by_image():
    """Return {bytes of an image: its label}."""
    train, _ = load_data()
    return {image.numpy().tobytes(): label for image, label in zip(*train.tensors)}


def load_model(parameters: dict) -> nn.Module:
    model = build_model()
    model.load_state_dict(parameters)
    return model


def replay(results: list[dict], lr: float) -> list[dict]:
    """Train on one rank with the batches of all ranks. Return the parameters after each epoch."""
    model = load_model(results[0]["parameters"][0])
    optimizer = torch.optim.SGD(model.parameters(), lr, MOMENTUM)
    epoch_parameters, epoch_steps = [], len(labels_by_image()) // BATCH
    for step, rank_batches in enumerate(zip(*(result["batches"] for result in results)), 1):
        optimizer.zero_grad()
        images = torch.cat(rank_batches)
        labels = [labels_by_image()[image.numpy().tobytes()] for image in images]
        cross_entropy(model(images), torch.stack(labels)).backward()
        optimizer.step()
        if step % epoch_steps == 0:
            epoch_parameters.append(parameters(model))
    return epoch_parameters
