"""Flags and their checks, the device, data sets: every chapter needs them, none teaches them.

Every chapter has the same file, so that a chapter's folder runs wherever it is copied.
"""

import argparse
import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np

from ranks import BACKENDS, CollectiveExit, device_kind, find_launcher, own_gpu

SHARED_GPU = "not every rank has a GPU of its own"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        if find_launcher()[1] == 0:  # all ranks have the same flags, so only rank 0 prints
            print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def make_parser(doc: str, lr: float) -> Parser:
    """Return a parser for the flags that all chapters share. lr: the default of --lr."""
    parser = Parser(description=doc.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--dataset", choices=("digits", "mnist", "svhn", "synthetic"), default="digits")
    add("--data-dir", default="data", help="folder of MNIST and SVHN, downloaded if missing (data)")
    add("--image-size", type=int, default=32, help="height and width of synthetic images (32)")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--batch-size", type=int, default=64, help="images per rank and step (64)")
    batch.add_argument("--global-batch-size", type=int, help="images per step on all ranks")
    add("--epochs", type=int, default=5)
    add("--max-steps", type=int, default=sys.maxsize, help="stop after this many steps")
    add("--lr", type=float, default=lr, help=f"learning rate per 256 images of global batch ({lr})")
    add("--warmup-epochs", type=float, default=0, help="epochs of rising learning rate (0)")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", *BACKENDS), default="auto")
    add("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    add("--checkpoint", metavar="PATH", help="file or folder to save to after each whole epoch")
    add("--resume", nargs="?", const=True, choices=("auto",), metavar="auto",
        help="continue from --checkpoint; with auto, start at step 0 if there is none")
    add("--timeout", type=int, default=1800, metavar="SECONDS",
        help="abort the job if a rank waits longer for another (1800)")
    add("--results", metavar="FILE", help="append one JSON line with what was measured")
    add("--local_rank", help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    return parser


def check(args: argparse.Namespace, device: str, global_batch: int, parts: int = 1,
          precision: str | None = None) -> None:
    """Exit with a one-line message if a flag's value is impossible, or if work could be lost.

    parts: into how many equal batches the global batch is split. precision: the one in use, if
    not that of --precision.
    """
    minimums = {"batch_size": 1, "epochs": 1, "max_steps": 1, "timeout": 1, "seed": 0, "layers": 1,
                "width": 1, "image_size": 6, "warmup_epochs": 0}
    for name in minimums.keys() & vars(args).keys():
        if not minimums[name] <= getattr(args, name) < math.inf:
            sys.exit(f"--{name.replace('_', '-')} has to be {minimums[name]} or more")
    if not 0 < args.lr < math.inf:
        sys.exit("--lr has to be above 0")
    if global_batch < 1 or global_batch % parts:
        sys.exit(f"--global-batch-size: {global_batch} is not a multiple of {parts}: ranks x "
                 "accumulation steps")
    side = {"digits": 8, "mnist": 28, "svhn": 32}.get(args.dataset, args.image_size)
    resnet = "resnet" in getattr(args, "model", "")
    if (precision or args.precision) == "bf16" and device == "cpu" and resnet and side <= 16:
        sys.exit("--precision bf16: on CPUs PyTorch gives a ResNet random gradients for images of "
                 "up to 16 x 16 pixels: use fp32, or larger images")
    for name in ("results", "checkpoint", "profile"):
        refuse_unwritable(getattr(args, name, None))
    if args.resume and not args.checkpoint:
        sys.exit("--resume: name the file to continue from, with --checkpoint")
    if args.resume is True and not has_checkpoint(args):
        sys.exit(f"there is no checkpoint {args.checkpoint}: remove --resume")
    if args.checkpoint and not args.resume and os.path.exists(args.checkpoint):
        sys.exit(f"{args.checkpoint} exists: continue with --resume, or remove it")


def refuse_unwritable(path: str | None) -> None:
    if path and not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
        sys.exit(f"cannot write {path}: name a file in a folder that you may write to")


# Device

def choose_device(args: argparse.Namespace, local_rank: int | None = None,
                  gpus: bool = True) -> object:
    """Return this rank's torch.device: a GPU of its own, or else, on all ranks, the CPU.

    local_rank: None for a program of one process. gpus: False if Horovod does not support them.
    """
    import torch
    kind = device_kind(args.device)
    index = 0 if kind != "cpu" and gpus else None
    if local_rank is not None and args.device != "cpu":
        index = own_gpu(local_rank, kind if gpus else "cpu")
    if index is not None:
        return torch.device(kind, index)
    reason = SHARED_GPU if gpus else "Horovod is built without GPU support"
    check_cpu_allowed(args, reason)
    if kind != "cpu" and find_launcher()[1] == 0:
        print(f"{reason}: all ranks train on the CPU", flush=True)
    if local_rank is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # else the ranks compete for the cores
    return torch.device("cpu")


def check_cpu_allowed(args: argparse.Namespace, reason: str = SHARED_GPU) -> None:
    """Exit on all ranks if --device asks for a GPU, but the program would use the CPU."""
    if args.device not in ("auto", "cpu"):
        raise CollectiveExit(f"--device {args.device}: {reason}: start one rank per GPU, or use "
                             "--device cpu")


# Data sets

class Images:
    """Images and labels in memory. With more labels than images, the images repeat.

    images: uint8, (n, channels, height, width); labels: int64.
    """

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, indices):
        indices = np.asarray(indices)
        return self.images[indices % len(self.images)], self.labels[indices]


def load_data(args: argparse.Namespace, global_batch: int) -> tuple[Images, Images]:
    """Return the training and the test images, as NumPy arrays."""
    load = {"digits": load_digits, "synthetic": make_images}.get(args.dataset, load_files)
    train, test = load(args, global_batch)
    if "resnet" in getattr(args, "model", ""):  # a ResNet needs three channels
        for part in (train, test):
            n, _, height, width = part.images.shape
            part.images = np.broadcast_to(part.images, (n, 3, height, width))
    if global_batch > len(train):
        sys.exit(f"{args.dataset} has {len(train)} training images, fewer than the {global_batch} "
                 "of a step: lower --batch-size, or use --dataset synthetic")
    return train, test


def make_images(args, global_batch):
    """Return random images for 50 steps per epoch. At most 256 are different."""
    shape = (min(50 * global_batch, 256), 3, args.image_size, args.image_size)
    images = np.random.default_rng(args.seed).integers(256, size=shape, dtype=np.uint8)
    return [Images(images, np.arange(n) % len(images) % 10) for n in (50 * global_batch, 100)]


def load_digits(*_):
    """Return scikit-learn's 1,797 digits. Importing scikit-learn would take a second."""
    folder, = find_spec("sklearn").submodule_search_locations
    rows = np.loadtxt(f"{folder}/datasets/data/digits.csv.gz", np.uint8, delimiter=",")
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    test = np.arange(len(images)) % 5 == 0
    return Images(images[~test], labels[~test]), Images(images[test], labels[test])


def load_files(args, _):
    """Return MNIST or SVHN. torchvision downloads missing files."""
    from torchvision.datasets import MNIST, SVHN
    socket.setdefaulttimeout(30)  # without a network a download may hang
    try:
        if args.dataset == "mnist":
            sets = [MNIST(args.data_dir, train, download=True) for train in (True, False)]
            return [Images(part.data.unsqueeze(1).numpy(), part.targets.numpy()) for part in sets]
        sets = [SVHN(args.data_dir, split, download=True) for split in ("train", "test")]
        return [Images(part.data, part.labels.astype(np.int64)) for part in sets]
    except Exception as problem:
        reason = " ".join(str(problem).split())[-300:]  # the end of the text names the reason
        sys.exit(f"{args.dataset} is missing or incomplete in --data-dir {args.data_dir}, and the "
                 f"download failed ({reason}): run this once where there is a network, or use "
                 "--dataset digits")


# Checkpoints

def has_checkpoint(args: argparse.Namespace) -> bool:
    """Return True if --resume has a checkpoint: a file, or a folder with the file `latest`."""
    paths = [args.checkpoint, os.path.join(args.checkpoint, "latest")] if args.resume else []
    return any(map(os.path.isfile, paths))


@contextmanager
def exit_on_load_error(args: argparse.Namespace) -> Iterator[None]:
    """Exit with a one-line message if the block fails. The block loads a checkpoint."""
    try:
        yield
    except Exception as problem:
        reason = " ".join(str(problem).split())[:150] or type(problem).__name__
        sys.exit(f"cannot continue from {args.checkpoint}: {reason}")


def refuse_other_settings(saved: dict, settings: dict) -> None:
    """Exit with a one-line message if a run with other flags saved the checkpoint."""
    for name, value in settings.items():
        if saved.get(name) != value:
            sys.exit(f"--resume: this checkpoint was trained with --{name.replace('_', '-')} "
                     f"{saved.get(name)}")
