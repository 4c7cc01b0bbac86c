"""Run a learner's script on ranks, as its launcher would, and record what it does.

load_data, build_model and the constants are the same as in the scripts of exercises 3 and 8.
"""

import functools
import os
import runpy
import sys
from pathlib import Path

import torch
import torch._dynamo  # imported once for all ranks, because optimizers need it
import torch.distributed as dist
from runner import Checks, is_close, on_ranks, record_calls
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


def run_with_torchrun(file: Path, ranks: int) -> list[dict]:
    """Run the script with the variables that torchrun sets. Return each rank's observe()."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}

    def run_rank(rank):
        variables = common | {"RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in variables.items()})
        sys.argv = [str(file)]
        return observe(file)
    return on_ranks(file, run_rank, ranks, backend=None)


def observe(file):
    """Run a script on this rank. Return a dict of what it did.

    "batches": the images of each step; "lines": the output; "calls": names of dist's functions;
    "start", "end": the parameters; "saved": the content of each file.
    """
    result = {"batches": [], "lines": []}
    models, calls = [], record_calls()

    def before_forward(module, args):
        """Record the batches of the first module that trains: the model, or its wrapper."""
        if not module.training or not torch.is_grad_enabled():
            return
        if not models:
            models.append(module)
            result["start"] = parameters(module)
        if module is models[0]:
            result["batches"].append(args[0].detach().clone())

    def record_line(*args, **kwargs):
        result["lines"].append(" ".join(map(str, args)))
        print(*args, **kwargs)

    register_module_forward_pre_hook(before_forward)
    dist.destroy_process_group = lambda *_: None  # gloo may abort if DDP still uses it
    runpy.run_path(str(file), {"print": record_line}, "__main__")
    if not models:
        raise RuntimeError("the script ended without training a model: is main() called?")
    saved = [torch.load(path, weights_only=False)
             for path in Path().iterdir()]
    names = [name for name, *_ in calls]
    return result | {"calls": names, "end": parameters(models[0]), "saved": saved}


def parameters(model):
    return {name.removeprefix("module."): parameter.detach().clone()
            for name, parameter in model.named_parameters()}


def same_tensors(tensors: dict, expected: dict) -> bool:
    """Return True if both have the same names and, up to rounding, equal values."""
    if tensors.keys() != expected.keys():
        return False
    return all(is_close(tensors[name], expected[name]) for name in expected)


@functools.cache
def labels_by_image():
    """Return {bytes of an image: its label}."""
    train, _ = load_data()
    return {image.numpy().tobytes(): label for image, label in zip(*train.tensors)}


def load_model(parameters: dict) -> nn.Module:
    model = build_model()
    model.load_state_dict(parameters)
    return model


def replay(start: dict, batches: list, lr: float) -> list[dict]:
    """Train on one rank with the batches of all ranks. Return the parameters after each epoch.

    batches: for each rank, the images of each step
    """
    model = load_model(start)
    optimizer = torch.optim.SGD(model.parameters(), lr, MOMENTUM)
    epoch_parameters, epoch_steps = [], len(labels_by_image()) // BATCH
    for step, rank_batches in enumerate(zip(*batches), 1):
        optimizer.zero_grad()
        images = torch.cat(rank_batches)
        labels = [labels_by_image()[image.numpy().tobytes()] for image in images]
        cross_entropy(model(images), torch.stack(labels)).backward()
        optimizer.step()
        if step % epoch_steps == 0:
            epoch_parameters.append(parameters(model))
    return epoch_parameters


def check_data(results: list[dict]) -> Checks:
    rank_images = len(labels_by_image()) // len(results)  # in an epoch
    image_sets = []
    for result in results:
        images = torch.cat(result["batches"])[:rank_images]
        image_sets.append({image.numpy().tobytes() for image in images})
    common_images = set.intersection(*image_sets)
    yield "each rank trains on different images", len(common_images) < 0.05 * rank_images, (
        "each rank's loader goes through all images, or its sampler has the wrong number of ranks: "
        "create a DistributedSampler after the process group, and drop shuffle=True")
    sizes = [len(result["batches"][0]) for result in results]
    yield f"a step takes {BATCH} images over all ranks", sum(sizes) == BATCH, (
        f"it takes {' + '.join(map(str, sizes))} = {sum(sizes)}: divide the loader's batch "
        "size by the number of ranks")


def check_training(results: list[dict], lr: float, epochs: int, drift_hint: str,
                   result_hint: str) -> Checks:
    """Check the parameters, the saved file and the printed lines.

    Hints: drift_hint, if the ranks' parameters differ; result_hint, if they differ from those of a
    one-rank run.
    """
    first = results[0]
    yield "the ranks' parameters stay equal", all(
        same_tensors(result["end"], first["end"]) for result in results), drift_hint
    steps = len(labels_by_image()) // BATCH
    first_epoch, last_epoch = first["batches"][:steps], first["batches"][-steps:]
    same_order = torch.equal(torch.cat(first_epoch), torch.cat(last_epoch))
    yield "the order changes every epoch", not same_order, (
        "each epoch has the same order: the sampler shuffles by its seed and the epoch's number; "
        "call sampler.set_epoch(epoch)")
    batches = [result["batches"] for result in results]
    end = replay(first["start"], batches, lr)[-1]
    yield "the result is that of one rank with the same batches, up to rounding", (
        same_tensors(first["end"], end)), f"the result differs from a one-rank run: {result_hint}"

    saved = [(rank, file) for rank, result in enumerate(results) for file in result["saved"]]
    yield "only one rank saves the model", len(saved) == 1, (
        f"there are {len(saved)} files, from ranks {[rank for rank, _ in saved]}: ranks that write "
        "the same file at the same time may corrupt it")
    state_dict = saved[0][1]
    yield "the saved state_dict loads into the plain model and has its final parameters", (
        isinstance(state_dict, dict) and same_tensors(state_dict, end)), (
        "it is not the plain model's final state_dict; in the wrapper's, every name begins with "
        '"module."')

    counts = [len(result["lines"]) for result in results]
    yield "each line is printed once, by one rank", sum(counts) == max(counts) == epochs + 1, (
        f"the ranks print {' and '.join(map(str, counts))} lines; expected: {epochs + 1} from one "
        "rank")
    images, labels = load_data()[1].tensors
    correct = load_model(end)(images).argmax(1) == labels
    accuracy = f"{correct.double().mean().item():.4f}"
    last_line = next(result["lines"][-1] for result in results if result["lines"])
    yield "the printed accuracy is that of all test images", accuracy in last_line, (
        f"the accuracy over all {len(labels)} images is {accuracy}, but the last line printed is: "
        f"{last_line}")
