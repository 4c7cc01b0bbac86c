"""Run a main.py unchanged, and write down what it does: `python observed.py FOLDER MAIN FLAG...`.

Into FOLDER go a copy of the checkpoint after each epoch (parameters.1, .2, ...), and a JSON line for each DataLoader
(batches.RANK: the indices of its batches), each optimizer step (rates.RANK: the learning rate), each input of the cnn
(inputs.RANK: mean, standard deviation, dtype) and each choice of a GPU (gpus.RANK). FAKE_GPUS=N,same|own lets torch
believe in N GPUs, to see which one is taken.
"""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

folder, main = Path(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]


def rank():
    return os.environ.get("RANK", "0")


def note(name, value):
    with open(folder / f"{name}.{rank()}", "a") as file:
        file.write(json.dumps(value) + "\n")


def observe_batches(loader, *args, sampler, original=DataLoader.__init__, **kwargs):
    note("batches", [batch.tolist() for batch in sampler])
    original(loader, *args, sampler=sampler, **kwargs)


def observe_rate(optimizer, *args, original=torch.optim.SGD.step, **kwargs):
    note("rates", optimizer.param_groups[0]["lr"])
    return original(optimizer, *args, **kwargs)


def observe_replace(source, target, original=os.replace):
    original(source, target)
    shutil.copy(target, folder / f"parameters.{len(list(folder.glob('parameters.*'))) + 1}")


def observe_input(model, images, original=torch.nn.Sequential.forward):
    if images.shape[1] == 1:  # the cnn itself, not a part of a ResNet
        note("inputs", [images.mean().item(), images.std().item(), str(images.dtype)])
    return original(model, images)


DataLoader.__init__ = observe_batches
torch.nn.Sequential.forward = observe_input
torch.optim.SGD.step = observe_rate
os.replace = observe_replace

if "FAKE_GPUS" in os.environ:
    import torch.distributed as dist

    count, identity = os.environ["FAKE_GPUS"].split(",")
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: int(count)
    torch.cuda.is_bf16_supported = lambda *_: False
    torch.cuda.set_device = lambda index: note("gpus", index)
    torch.cuda.mem_get_info = lambda: (0, 0)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=rank() if identity == "own" else "the same")
    dist.init_process_group = lambda backend, original=dist.init_process_group: original("gloo")

if "svhn" in sys.argv:  # the test's own small files instead of the real ones, whose checksums torchvision knows
    from torchvision.datasets import SVHN

    SVHN.split_list = {split: [url, name, None] for split, (url, name, _) in SVHN.split_list.items()}

runpy.run_path(main, run_name="__main__")
