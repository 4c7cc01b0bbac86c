"""What every chapter needs and none teaches: flags, checks, data sets, times and the record.

The same file lies in every chapter, so that a chapter's folder runs wherever it is copied.
"""

import argparse
import json
import math
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import islice

import numpy as np
from tqdm import tqdm

from ranks import SameOnAllRanks, exit_together, launched, one_each, own_gpu, run

CLASSES = 10
SYNTHETIC = 256  # images that differ: BatchNorm divides by their variance, which may not be 0
BACKENDS = {  # torch.distributed's, by device: AMD's GPUs are cuda, too; Intel's, untried, are xpu
    "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl", "cpu": "gloo"}
NO_MULTIPLE = "--global-batch-size: not a multiple of the {} ranks"
SHARED_GPU = "not every rank has a GPU of its own"
STARTED = time.perf_counter()


# Flags

class Parser(argparse.ArgumentParser):
    def error(self, message):
        sys.exit(message)  # one line, without the usage


def whole(text: str, least: int = 1) -> int:
    if not text.isdecimal() or not least <= int(text) < 2**32:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from {least} to {2**32 - 1}")
    return int(text)


def make_parser(doc: str, lr: float) -> Parser:
    """The flags that all programs have; those of its network are added by each."""
    parser = Parser(description=doc.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--dataset", choices=("digits", "mnist", "svhn", "synthetic"), default="digits")
    add("--data-dir", default="data", help="where MNIST and SVHN are, or are downloaded to (data)")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--batch-size", type=whole, help="images of a rank at a time (64)")
    batch.add_argument("--global-batch-size", type=whole, help="images per step on all ranks")
    add("--epochs", type=whole, default=5)
    add("--max-steps", type=whole, default=math.inf, help="stop after this many steps")
    add("--lr", type=float, default=lr, help=f"learning rate per 256 images of global batch ({lr})")
    add("--warmup-epochs", type=float, default=0, help="the learning rate rises over these (0)")
    add("--seed", type=partial(whole, least=0), default=0)
    add("--device", choices=("auto", *BACKENDS), default="auto")
    add("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    add("--image-size", type=whole, default=32, help="pixels a side of synthetic images (32)")
    add("--checkpoint", metavar="PATH", help="saved after each whole epoch")
    add("--resume", nargs="?", const=True, choices=("auto",), metavar="auto",
        help="continue from --checkpoint; with auto, start anew where there is none")
    add("--timeout", type=whole, default=1800, metavar="SECONDS",
        help="a rank that waits so long for another ends the job (1800)")
    add("--results", metavar="FILE", help="append one JSON line with what was measured")
    add("--local_rank", help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    return parser


def parse_args(doc: str) -> argparse.Namespace:
    """The flags of chapters 1 to 4."""
    parser = make_parser(doc, lr=0.2)
    parser.add_argument("--model", choices=("cnn", "resnet18", "resnet50"), default="cnn")
    if "tensorflow" not in sys.modules:
        parser.add_argument("--compile", action="store_true", help="torch.compile the model")
        parser.add_argument("--profile", metavar="FILE", help="trace three steps, for perfetto.dev")
    return parser.parse_args()


# Checks: a mistake that would train something else, or lose work, is one line before training

def refuse_batch_early() -> None:
    """End all ranks where they cannot share the global batch, before they import PyTorch."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--global-batch-size")
    batch, (_, _, world_size) = parser.parse_known_args()[0].global_batch_size or "", launched()
    if batch.isdecimal() and int(batch) % world_size:
        run(partial(sys.exit, NO_MULTIPLE.format(world_size)))


def check(args: argparse.Namespace, device: str, world_size: int = 1,
          accumulation: int = 1) -> None:
    """Exit where the flags cannot be followed. args.resume becomes whether to load a checkpoint."""
    if args.global_batch_size % (world_size * accumulation):
        steps = f" x {accumulation} accumulation steps" if accumulation > 1 else ""
        sys.exit(NO_MULTIPLE.format(world_size) + steps)
    if args.image_size < 6:
        sys.exit("--image-size: the networks need 6 pixels a side or more")
    if not 0 < args.lr < math.inf or not 0 <= args.warmup_epochs < math.inf:
        sys.exit("--lr has to be above 0, and --warmup-epochs not below")
    sides = {"digits": 8, "mnist": 28, "svhn": 32, "synthetic": args.image_size}
    small_resnet = "resnet" in getattr(args, "model", "") and sides[args.dataset] <= 16
    if (args.precision, device) == ("bf16", "cpu") and small_resnet:
        sys.exit("--precision bf16: on CPUs PyTorch gives a ResNet random gradients for images of "
                 "16 pixels or fewer; take fp32, or larger images")
    refuse_unwritable(args.results)
    refuse_unwritable(getattr(args, "profile", None))
    refuse_unwritable(args.checkpoint and f"{args.checkpoint}.tmp")  # which is written first
    if args.resume and not args.checkpoint:
        sys.exit("--resume: name the file to continue from, with --checkpoint")
    saved = bool(args.checkpoint) and is_saved(args.checkpoint)
    if args.checkpoint and os.path.exists(args.checkpoint) and not args.resume:
        sys.exit(f"{args.checkpoint} exists: continue with --resume, or remove it")
    if args.resume is True and not saved:
        sys.exit(f"there is no checkpoint {args.checkpoint}: leave out --resume")
    args.resume = bool(args.resume and saved)


def refuse_unwritable(path: str | None) -> None:
    if not path:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or os.path.isdir(path):
        sys.exit(f"cannot write {path}: name a file in a folder that you may write to")


def gpu_kind(args: argparse.Namespace) -> str | None:
    """Return the kind of GPU that is here and that --device allows, in PyTorch's name, or None."""
    import torch
    kinds = [kind for kind in BACKENDS if kind != "cpu" and args.device in ("auto", kind)]
    return next((kind for kind in kinds if torch.get_device_module(kind).is_available()), None)


def backend(args: argparse.Namespace) -> str:
    """Return the backend for init_process_group(): gloo between CPUs, NCCL between GPUs."""
    return BACKENDS[gpu_kind(args) or "cpu"]


def choose_device(args: argparse.Namespace, local_rank: int | None = None,
                  gpus: bool = True) -> object:
    """Return this rank's torch.device: a GPU of its own, or the CPU, which then all ranks take.

    local_rank: None for a program of one process. gpus: False where the ranks can send nothing from
    GPU to GPU. Exits where --device asks for GPUs in vain.
    """
    import torch
    kind, index, reason = gpu_kind(args), 0, SHARED_GPU
    if kind and not gpus:
        kind, reason = None, "Horovod is built without GPU support"
    if args.device != "cpu" and local_rank is not None:
        index = own_gpu(local_rank, kind)
    if kind and index is not None:
        return torch.device(kind, index)
    take_cpu(args, reason if gpu_kind(args) else None)
    if local_rank is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # or the ranks crowd each other on the cores
    return torch.device("cpu")


def refuse_shared_gpus(args: argparse.Namespace, gpus: list) -> None:
    """Exit if two ranks would take the same one of TensorFlow's GPUs; gpus: this rank's, or none.

    TensorFlow cannot let go of a GPU once the ranks can tell each other which they have.
    """
    seen = [os.environ.get(f"{maker}_VISIBLE_DEVICES") for maker in ("CUDA", "ROCR", "HIP")]
    alone = one_each((socket.gethostname(), *seen, gpus[0].name) if gpus else None)
    if gpus and not alone:
        exit_together(f"{SHARED_GPU}: start one rank per GPU, or use --device cpu")
    if not alone:
        take_cpu(args)


def take_cpu(args: argparse.Namespace, reason: str | None = None) -> None:
    """Say why all ranks take the CPU though there is a GPU; exit where --device forbids that."""
    if args.device not in ("auto", "cpu"):
        raise SameOnAllRanks(f"--device {args.device}: {reason or 'there is no such GPU'}: start "
                             "one rank per GPU, or use --device cpu")
    if reason and args.device == "auto" and launched()[1] == 0:
        print(f"{reason}: all ranks train on the CPU", flush=True)


def memory_format(args: argparse.Namespace, device: str) -> object:
    """Return the torch.memory_format of images in which convolutions are fastest.

    channels_last, where a pixel's channels are neighbours, is fastest on GPUs, and in bf16 on CPUs.
    """
    import torch
    fast = device != "cpu" or args.precision == "bf16"
    return torch.channels_last if fast else torch.contiguous_format


# Data sets

def load_data(args: argparse.Namespace) -> tuple[tuple[np.ndarray, ...], ...]:
    """Images and labels to train with, and to test with. Images: bytes (n, channels, side, side).

    Synthetic images are fewer than their labels: they repeat. Those to test with are the same.
    """
    load = {"digits": load_digits, "synthetic": make_images}.get(args.dataset, load_files)
    train, test = load(args)
    if args.global_batch_size > len(train[1]):
        sys.exit(f"{args.dataset} has {len(train[1])} training images, fewer than the "
                 f"{args.global_batch_size} of a step: lower --batch-size, or take --dataset "
                 "synthetic")
    return train, test


def make_images(args):
    n, side = 50 * args.global_batch_size, args.image_size
    shape = (min(n, SYNTHETIC), 3, side, side)
    images = np.random.default_rng(args.seed).integers(256, size=shape, dtype=np.uint8)
    return (images, np.arange(n) % len(images) % CLASSES), (images, np.arange(100) % CLASSES)


def load_digits(args):
    """scikit-learn's 1,797 digits. Its file alone: importing scikit-learn takes a second."""
    folder, = find_spec("sklearn").submodule_search_locations
    rows = np.loadtxt(f"{folder}/datasets/data/digits.csv.gz", np.uint8, delimiter=",")
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    test = np.arange(len(images)) % 5 == 0
    return (images[~test], labels[~test]), (images[test], labels[test])


def load_files(args):
    """MNIST or SVHN, through torchvision, which downloads what is not there."""
    if "tensorflow" in sys.modules:  # beside it triton, of PyTorch's CUDA build, crashes
        sys.modules["triton"] = None
    from torchvision.datasets import MNIST, SVHN
    socket.setdefaulttimeout(30)  # a node without a network may answer with silence
    try:
        if args.dataset == "mnist":
            sets = [MNIST(args.data_dir, train, download=True) for train in (True, False)]
            return [(part.data.unsqueeze(1).numpy(), part.targets.numpy()) for part in sets]
        sets = [SVHN(args.data_dir, split, download=True) for split in ("train", "test")]
        return [(part.data, part.labels.astype(np.int64)) for part in sets]
    except Exception as problem:
        reason = " ".join(str(problem).split())[-300:]  # its end says why
        sys.exit(f"no whole {args.dataset} in --data-dir {args.data_dir}, and no download "
                 f"({reason}): run this once where there is a network, or take --dataset digits, "
                 "which needs none")


def load_tensors(args: argparse.Namespace) -> list:
    """What load_data() returns, as two TensorDatasets, in the CPU's memory."""
    import torch
    from torch.utils.data import TensorDataset

    class Repeated(TensorDataset):
        """As many images as labels; after the last different one the first comes again."""

        def __init__(self, images, labels):
            self.tensors = images, labels

        def __len__(self):
            return len(self.tensors[1])

        def __getitem__(self, indices):
            indices = torch.as_tensor(indices)
            return self.tensors[0][indices % len(self.tensors[0])], self.tensors[1][indices]

    sets = []
    for images, labels in load_data(args):
        channels = 3 if "resnet" in getattr(args, "model", "") else images.shape[1]
        images = torch.from_numpy(images).expand(-1, channels, -1, -1)
        kind = Repeated if args.dataset == "synthetic" else TensorDataset
        sets.append(kind(images, torch.from_numpy(labels)))
    return sets


# Checkpoints

def is_saved(path: str) -> bool:
    """Whether a checkpoint is there: a file, or a folder with the file that is written last."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, "latest"))


def training_of(args: argparse.Namespace) -> dict:
    """The flags that have to be the same when a training continues."""
    names = ("dataset", "image_size", "model", "stage", "width", "layers", "global_batch_size",
             "precision", "seed")
    return {name: value for name, value in vars(args).items() if name in names}


@contextmanager
def resuming(args: argparse.Namespace, world_size: int = 1) -> Iterator[None]:
    """If the block fails on a rank, the file is no checkpoint of this training: all ranks exit."""
    message = None
    try:
        yield
    except Exception as problem:
        reason = " ".join(str(problem).split())[:150] or type(problem).__name__
        message = (f"cannot continue from {args.checkpoint}, no whole checkpoint of this training: "
                   f"{reason}")
    if world_size > 1:
        exit_together(message)
    elif message:
        sys.exit(message)


def refuse_other(training: dict, args: argparse.Namespace) -> None:
    for name, value in training_of(args).items():
        if training.get(name) != value:
            raise ValueError(f"its training had --{name.replace('_', '-')} {training.get(name)}")


# What is printed and recorded

class Report:
    """What rank 0 prints while it trains, and the record of --results; silent on other ranks."""

    def __init__(self, chapter, args, device, parameters, images, rank=0, world_size=1, nodes=1):
        self.args, self.rank, self.images = args, rank, images
        on_gpu = device != "cpu" and "tensorflow" not in sys.modules
        self.gpu = sys.modules["torch"].get_device_module(device) if on_gpu else None
        self.step_seconds, self.said = [], time.perf_counter()
        self.profiler = getattr(args, "profile", None) and rank == 0 and profiler(args.profile)
        self.record = {"chapter": chapter, "ranks": world_size, "nodes": nodes, "device": device,
                       **training_of(args), "batch_size": args.batch_size,
                       "parameters": parameters}

    def print(self, line):
        if self.rank == 0:
            print(line, flush=True)
            self.said = time.perf_counter()

    def begin(self, step, last_step, epoch_steps, lr):
        args, record = self.args, self.record
        self.steps_left, self.epoch_steps = last_step - step, epoch_steps
        if getattr(args, "profile", None) and self.steps_left < 8:
            sys.exit(f"--profile needs 8 steps, and {self.steps_left} are left: more --epochs")
        network = args.model if "model" in args else f"stage {args.stage}"  # chapter 5's perceptron
        self.print(f"{args.dataset}: {self.images:,} images, {network}: "
                   f"{record['parameters']:,} parameters, {args.precision}, {record['device']}")
        self.print(f"ranks: {record['ranks']}, nodes: {record['nodes']}, batch: "
                   f"{args.batch_size} a rank, {args.global_batch_size} global, learning rate: "
                   f"{lr:g}, steps: {step} of {last_step} done, {epoch_steps} an epoch")

    def steps(self, batches, each=1):
        """The batches of an epoch, `each` of them per step, or of as many steps as are left.

        Notes the time after each step. On a terminal a progress bar runs; elsewhere a line every
        ten seconds says that the training goes on.
        """
        steps = min(self.epoch_steps, self.steps_left)
        self.steps_left -= steps
        self.epoch_started, self.times = time.perf_counter(), [self.now()]
        hidden = True if self.rank > 0 else None  # None: shown on a terminal only
        bar = tqdm(total=steps, leave=False, disable=hidden)
        for number, batch in enumerate(islice(batches, steps * each), 1):
            yield batch
            if number % each == 0:
                self.times.append(self.now())
                if self.profiler:
                    self.profiler.step()
                bar.update()
                if bar.disable and time.perf_counter() - self.said > 10:
                    self.print(f"  step {number // each} of {steps}")
        bar.close()

    def now(self):
        if not self.gpu:
            return time.perf_counter()
        # An event is recorded on the GPU when it comes to it; the CPU does not wait.
        return self.gpu.current_stream().record_event(self.gpu.Event(enable_timing=True))

    def epoch(self, epoch, loss, accuracy):
        """After each epoch, when loss and accuracy have been read, so that the device is idle."""
        seconds = time.perf_counter() - self.epoch_started
        speed = (len(self.times) - 1) * self.args.global_batch_size / seconds
        if not math.isfinite(loss):
            sys.exit(f"the loss became {loss} in epoch {epoch + 1}: lower --lr, or give it "
                     "--warmup-epochs")
        self.print(f"epoch {epoch + 1}/{self.args.epochs}: loss {loss:.4f}, accuracy "
                   f"{accuracy:.4f}, {speed:,.0f} images/s")
        self.step_seconds += [start.elapsed_time(end) / 1000 if self.gpu else end - start
                              for start, end in zip(self.times, self.times[1:])]
        self.record |= {"loss": loss, "accuracy": accuracy}
        if self.rank == 0 and not self.steps_left and sys.stderr.isatty():
            print("testing ...", end="\r", file=sys.stderr, flush=True)  # until the next line

    def end(self, right, total, **more):
        """After the evaluation. `more` goes into the record, and overrides what is there."""
        self.print(f"test accuracy {right / total:.4f} ({right} of {total} images)")
        problem = None
        if self.rank == 0 and self.args.results and self.step_seconds:
            problem = self.write_record({"test_accuracy": right / total, **more})
        if self.args.results:
            self.exit(problem)

    def write_record(self, results):
        """Append the record with these results to the file; return what is wrong where it fails."""
        step_time = statistics.median(self.step_seconds[5:] or self.step_seconds)  # 5 warm up
        bytes_each = 8 if self.args.precision == "fp64" else 4
        link = {"link": os.environ["LAB_LINK"]} if "LAB_LINK" in os.environ else {}  # submit/lab.sh
        self.record |= {"steps": len(self.step_seconds), "step_seconds": step_time,
                        "images_per_second": self.args.global_batch_size / step_time,
                        "gradient_bytes": bytes_each * self.record["parameters"],
                        "peak_memory_bytes": self.peak_memory(),
                        "total_seconds": time.perf_counter() - STARTED, **link, **results}
        line = json.dumps(self.record)
        try:
            with open(self.args.results, "a") as file:
                file.write(f"{line}\n")
        except OSError as problem:  # the disk may have filled up: the numbers are not lost
            return (f"could not write the record to {self.args.results} ({problem.strerror}): "
                    f"{line}")

    def exit(self, message):
        """Exit on all ranks if one has a message; all ranks call it."""
        if self.record["ranks"] > 1:
            exit_together(message)
        elif message:
            sys.exit(message)

    def peak_memory(self):
        if self.gpu:
            return self.gpu.max_memory_allocated()
        if self.record["device"] == "cuda":
            return sys.modules["tensorflow"].config.experimental.get_memory_info("GPU:0")["peak"]
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def profiler(path: str) -> object:
    """Start PyTorch's profiler: after five steps it writes a trace of three into the file."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    import torch
    activity = torch.profiler.ProfilerActivity
    profile = torch.profiler.profile(
        activities=[activity.CPU, activity.CUDA][:1 + torch.cuda.is_available()], acc_events=True,
        schedule=torch.profiler.schedule(skip_first=4, wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(path))
    profile.start()
    return profile


@contextmanager
def quiet() -> Iterator[None]:
    """Discard standard error: TensorFlow writes there on import, whatever its variables say."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


refuse_batch_early()
