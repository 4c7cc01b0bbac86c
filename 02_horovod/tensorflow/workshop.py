"""What every chapter needs and none teaches: flags, data sets, checks, times and the record.

The same file lies in every chapter, so that a chapter's folder runs wherever it is copied.
"""

import argparse
import hashlib
import json
import math
import os
import resource
import socket
import statistics
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import IO

import numpy as np
from tqdm import tqdm

from ranks import gather, horovod, moves, watch

CLASSES = 10
BACKENDS = {  # torch.distributed's, by device: AMD's GPUs are cuda, too; Intel's, untried, are xpu
    "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl", "cpu": "gloo"}
STARTED = time.perf_counter()
HELD = {}  # the names of checkpoints that this process writes


# Flags

class Parser(argparse.ArgumentParser):
    def error(self, message):
        sys.exit(message)  # one line, without the usage


def whole(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    if int(text) >= 2**48:  # NumPy would answer with an exception of its own
        raise argparse.ArgumentTypeError(f"{text} is more than any training takes")
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def make_parser(doc: str, lr: float) -> Parser:
    """The flags that all programs have; those of its network are added by each."""
    parser = Parser(description=doc.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--dataset", choices=("digits", "mnist", "svhn", "synthetic"), default="digits")
    add("--data-dir", default="data", help="where MNIST and SVHN are, or are downloaded to (data)")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--batch-size", type=whole, help="images a step on each rank (64)")
    batch.add_argument("--global-batch-size", type=whole, help="images a step on all ranks")
    add("--epochs", type=whole, default=5)
    add("--max-steps", type=whole, default=math.inf, help="stop after this many steps")
    add("--lr", type=float, default=lr, help=f"learning rate per 256 images of global batch ({lr})")
    add("--warmup-epochs", type=float, default=0, help="the learning rate rises over these (0)")
    add("--seed", type=seed, default=0)
    add("--device", choices=("auto", *BACKENDS), default="auto")
    add("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    add("--image-size", type=whole, default=32, help="pixels a side, for synthetic images (32)")
    add("--checkpoint", metavar="PATH", help="saved after each epoch")
    add("--resume", nargs="?", const=True, choices=("auto",), metavar="auto",
        help="go on from --checkpoint; auto: if there is one, else begin")
    add("--timeout", type=whole, default=1800, metavar="SECONDS",
        help="several ranks end when they wait so long for another (1800)")
    add("--results", metavar="FILE", help="append one JSON line with what was measured")
    add("--local_rank", help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    return parser


def parse_args(doc: str) -> argparse.Namespace:
    """The flags of chapters 1 to 4."""
    parser = make_parser(doc, lr=0.2)
    parser.add_argument("--model", choices=("cnn", "resnet18", "resnet50"), default="cnn")
    return watched(parser.parse_args())


def watched(args: argparse.Namespace) -> argparse.Namespace:
    """From here on no rank waits for ever."""
    watch(args.timeout)
    return args


# Checks, before anything is trained: a mistake is one line that says what to do

def check(args: argparse.Namespace, device: str, rank: int = 0, ranks: int = 1,
          accumulation: int = 1) -> None:
    """Exit where the flags cannot be followed."""
    if rank == 0:  # it writes for all
        refuse_unwritable(args.results)
        if args.checkpoint:
            saves_folders = "checkpoints" in sys.modules  # chapters 4 and 5
            there = saves_folders and os.path.isdir(args.checkpoint)
            file = os.path.join(args.checkpoint, "latest") if there else args.checkpoint
            refuse_unwritable(file)
            refuse_unwritable(f"{file}.tmp")  # it is written first
            if there:
                sys.modules["checkpoints"].refuse_foreign(args.checkpoint)
            written = [os.path.realpath(name) for name in (file, f"{file}.tmp")]
            if args.results and os.path.realpath(args.results) in written:
                sys.exit("--checkpoint and --results: name two files")
            refuse_second_job(args.checkpoint)
        link_of_lab()  # exits where there is no lab
    if args.device not in ("auto", device):
        sys.exit(f"--device {args.device}: no such GPU is seen here; take --device cpu")
    if args.precision == "bf16":
        refuse_missing_bf16(args, device)
    hvd = horovod()
    if device != "cpu" and hvd and not hvd.cuda_built() and not hvd.rocm_built():
        sys.exit("Horovod was built without GPUs: see its README")
    if args.global_batch_size % (ranks * accumulation):
        steps = f" x {accumulation} accumulation steps" if accumulation > 1 else ""
        sys.exit(f"--global-batch-size: not a multiple of the {ranks} ranks{steps}")
    if args.image_size < 6:
        sys.exit("--image-size: the networks need 6 pixels a side or more")
    if not 0 < args.lr < math.inf or not 0 <= args.warmup_epochs < math.inf:
        sys.exit("--lr has to be above 0, and --warmup-epochs not below")
    if args.resume and not args.checkpoint:
        sys.exit("--resume: name the file to go on from, with --checkpoint")
    if args.resume == "auto":
        args.resume = is_saved(args.checkpoint)
    elif args.resume and not os.path.exists(args.checkpoint):
        sys.exit(f"{args.checkpoint} does not exist: leave out --resume")
    elif args.checkpoint and not args.resume and os.path.exists(args.checkpoint):
        sys.exit(f"{args.checkpoint} exists: go on with --resume, or remove it")


def refuse_unwritable(path: str | None) -> None:
    if path and not opens(path):
        sys.exit(f"cannot write {path}: name a file in a folder that exists and that you may "
                 "write to")


def refuse_second_job(checkpoint: str) -> None:
    """Two jobs would mix up what they write. Those of other machines are not seen."""
    name = "\0" + hashlib.sha256(os.fsencode(os.path.realpath(checkpoint))).hexdigest()
    if name not in HELD and sys.platform == "linux":
        HELD[name] = socket.socket(socket.AF_UNIX)  # a name that ends with this process
        try:
            HELD[name].bind(name)
        except OSError:
            sys.exit(f"another job writes {checkpoint}: wait for its end, or name another")


def opens(path: "str | os.PathLike") -> bool:
    """Whether a file of this name opens for writing, which its folder's rights do not tell.

    Nothing is left behind, nor seen meanwhile: another job may just write the file itself.
    """
    try:
        if os.path.lexists(path):
            open(path, "a").close()
        else:
            NamedTemporaryFile(dir=os.path.dirname(path), prefix=os.path.basename(path)).close()
    except OSError:
        return False
    return True


def refuse_missing_bf16(args, device):
    """Exit where the framework in use cannot compute this in bf16 on this device."""
    if "tensorflow" in sys.modules:
        tf = sys.modules["tensorflow"]
        try:
            image, kernel = tf.ones((1, 8, 8, 1), tf.bfloat16), tf.ones((3, 3, 1, 32), tf.bfloat16)
            tf.nn.conv2d(image, kernel, 1, "VALID")
        except tf.errors.OpError:
            sys.exit("--precision bf16: oneDNN, which TensorFlow uses, has it for CPUs with "
                     "AVX-512 alone; take fp32, or TensorFlow's own slower convolutions: "
                     "TF_ENABLE_ONEDNN_OPTS=0")
    elif device == "cuda" and not sys.modules["torch"].cuda.is_bf16_supported(False):
        sys.exit("no bf16 on this GPU: take fp32")
    elif device == "cpu" and "resnet" in getattr(args, "model", ""):
        sides = {"digits": 8, "mnist": 28, "svhn": 32, "synthetic": args.image_size}
        if sides[args.dataset] <= 16:  # no gradient is set where stride 2 gets one pixel
            sys.exit("--precision bf16: on CPUs PyTorch gives a ResNet random gradients for images "
                     "of 16 pixels or fewer; take fp32, or --dataset synthetic --image-size 32")


def choose_device(args: argparse.Namespace) -> object:
    """torch.device of the kind of GPU that is seen here and --device allows, or of the CPU."""
    import torch
    allowed = [name for name in BACKENDS if args.device in ("auto", name)]
    seen = [name for name in allowed if torch.get_device_module(name).is_available()]
    return torch.device((seen or ["cpu"])[0])


def share_cores(device: str, ranks: int) -> None:
    """On CPUs each of several ranks takes one thread, or they crowd each other on the cores."""
    if device == "cpu" and ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        sys.modules["torch"].set_num_threads(1)


def refuse_shared_gpus(device: str) -> None:
    """Exit where two ranks have the same GPU, in a line; NCCL would say it in pages."""
    own = None
    if device != "cpu":
        gpu = sys.modules["torch"].get_device_module(device)
        own = str(gpu.get_device_properties(gpu.current_device()).uuid)
    gpus = [gpu for gpu in gather(own) if gpu]
    if len(set(gpus)) < len(gpus):
        sys.exit("several ranks have the same GPU: start at most one a GPU, or take --device cpu")


# Data sets

def load_data(args: argparse.Namespace) -> tuple[tuple[np.ndarray, ...], ...]:
    """Images and labels to train with, and to test with. Images: bytes (n, channels, side, side).

    Of synthetic images there is a single one, for all labels, however large the batch.
    """
    load = {"digits": load_digits, "synthetic": make_images}.get(args.dataset, load_files)
    try:
        train, test = load(args)
    except MemoryError as problem:
        sys.exit(f"no memory for these images: lower --image-size or --batch-size ({problem})")
    n = len(train[1])
    parts = args.global_batch_size // args.batch_size
    if args.global_batch_size > n:
        sys.exit(f"{args.dataset} has {n} training images, not the {args.global_batch_size} of a "
                 f"step: at most --batch-size {n // parts} fits, or take --dataset synthetic")
    return train, test


def make_images(args):
    side, n = args.image_size, 50 * args.global_batch_size
    image = np.random.default_rng(args.seed).integers(256, size=(1, 3, side, side), dtype=np.uint8)
    return (image, np.arange(n) % CLASSES), (image, np.arange(100) % CLASSES)


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
            sets = [open_set(MNIST, args.data_dir, train) for train in (True, False)]
            return [(part.data.unsqueeze(1).numpy(), part.targets.numpy()) for part in sets]
        sets = [open_set(SVHN, args.data_dir, split) for split in ("train", "test")]
        return [(part.data, part.labels.astype(np.int64)) for part in sets]
    except Exception as problem:
        reason = " ".join(str(problem).split())[-300:]  # its end says why
        sys.exit(f"no whole {args.dataset} in --data-dir {args.data_dir}, and no download "
                 f"({reason}): remove what is broken there, and run this once where there is a "
                 "network, or take --dataset digits, which needs none")


def open_set(kind, folder, part):
    """A data set of torchvision, downloaded if it is not there.

    It is downloaded beside its place: what has its name is whole, whoever else downloads meanwhile.
    """
    try:
        return refuse_changed(kind(folder, part))
    except RuntimeError as problem:
        if "not found" not in str(problem):
            raise  # broken; and perhaps somebody's own
    os.makedirs(folder, exist_ok=True)
    with TemporaryDirectory(prefix=".download-", dir=folder) as beside:
        kind(beside, part, download=True)
        for file in [path for path in Path(beside).rglob("*") if path.is_file()]:
            place = Path(folder, file.relative_to(beside))
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
    return refuse_changed(kind(folder, part))


def refuse_changed(images):
    """The same, of MNIST with a look at what torchvision checks only once, after a download.

    An archive has a known sum and ends with one of its content. Files that lie there without an
    archive are somebody's own.
    """
    for name, md5 in getattr(images, "resources", ()):  # SVHN has none: it is always checked
        archive = Path(images.raw_folder, name)
        if archive.exists():
            packed, content = archive.read_bytes(), archive.with_suffix("").read_bytes()
            whole = hashlib.md5(packed, usedforsecurity=False).hexdigest() == md5
            if not whole or zlib.crc32(content) != int.from_bytes(packed[-8:-4], "little"):
                raise RuntimeError(f"{archive.with_suffix('')} is not what was downloaded")
    return images


def load_tensors(args: argparse.Namespace, device: object) -> list:
    """The same as two of PyTorch's data sets, on the device: SVHN, the largest, takes 300 MB."""
    import torch
    from torch.utils.data import TensorDataset
    sets = []
    for images, labels in load_data(args):
        images = torch.from_numpy(images).to(device)
        channels = images.shape[1]
        if "resnet" in getattr(args, "model", ""):
            channels = 3  # torchvision's ResNets want three
        images = images.expand(len(labels), channels, -1, -1)  # the synthetic one for all labels
        sets.append(TensorDataset(images, torch.from_numpy(labels).to(device)))
    return sets


# Checkpoints

def is_saved(path: str) -> bool:
    """Whether a checkpoint is there: a file, or a folder with what a library adds last."""
    last = ("latest", ".metadata")
    return os.path.isfile(path) or any(os.path.isfile(os.path.join(path, name)) for name in last)


def link_of_lab() -> list[str]:
    """The speed of the link between the nodes of submit/lab.sh, as 1gbit; elsewhere nothing."""
    folder = os.environ.get("LAB_FOLDER")
    try:
        return [Path(folder, "rate").read_text().strip()] if folder else []
    except OSError:
        sys.exit(f"LAB_FOLDER={folder}: there is no lab; unset it")


def training_of(args: argparse.Namespace) -> dict:
    """The flags that have to be the same when a training goes on."""
    names = ("dataset", "image_size", "model", "stage", "width", "layers", "global_batch_size",
             "precision", "seed")
    return {name: value for name, value in vars(args).items() if name in names}


@contextmanager
def resuming(args: argparse.Namespace) -> Iterator[None]:
    """What fails within is a checkpoint of another training, or half a one: one line instead."""
    try:
        if os.path.isfile(args.checkpoint):
            refuse_altered(args.checkpoint)
        yield
    except Exception as problem:
        reason = " ".join(str(problem).split())[:150] or type(problem).__name__
        sys.exit(f"cannot go on from {args.checkpoint}, no whole checkpoint of this training: "
                 f"{reason}")


def refuse_altered(path: "str | os.PathLike | IO[bytes]") -> None:
    """Raise an exception where the file is none that torch.save or np.savez wrote, bit for bit.

    They write checksums, which torch.load does not read.
    """
    with zipfile.ZipFile(path) as parts:
        if altered := parts.testzip():
            raise ValueError(f"{altered} in it has been altered")


def refuse_other(training: dict, args: argparse.Namespace) -> None:
    if training != training_of(args):
        raise ValueError(f"its training had {training}")


# What is printed and recorded

class Report:
    """What rank 0 prints while it trains, and the record of --results; silent on other ranks."""

    def __init__(self, chapter, args, device, parameters, images, rank=0, ranks=1, nodes=1):
        self.args, self.rank, self.images = args, rank, images
        on_gpu = device != "cpu" and "tensorflow" not in sys.modules
        self.gpu = sys.modules["torch"].get_device_module(device) if on_gpu else None
        self.times, self.step_seconds, self.link = [], [], link_of_lab()
        self.record = {"chapter": chapter, "ranks": ranks, "nodes": nodes, "device": device,
                       **training_of(args), "batch_size": args.batch_size,
                       "parameters": parameters}

    def print(self, line):
        if self.rank == 0:
            print(line)

    def begin(self, step, last_step, epoch_steps, lr):
        args, record = self.args, self.record
        network = args.model if "model" in args else f"stage {args.stage}"  # chapter 5's perceptron
        self.print(f"{args.dataset}: {self.images:,} images, {network}: "
                   f"{record['parameters']:,} parameters, {args.precision}, {record['device']}")
        self.print(f"ranks: {record['ranks']}, nodes: {record['nodes']}, batch: "
                   f"{args.batch_size} a rank, {args.global_batch_size} global, learning rate: "
                   f"{lr:g}, steps: {step} of {last_step} done, {epoch_steps} an epoch")

    def steps(self, batches, total, each=1):
        """The batches, with a progress bar on a terminal; notes the time after every `each`."""
        self.epoch_started, self.times = time.perf_counter(), [self.now()]
        hidden = True if self.rank > 0 else None  # None: shown on a terminal only
        for number, batch in enumerate(tqdm(batches, total=total, leave=False, disable=hidden), 1):
            yield batch
            moves()
            if number % each == 0:
                self.times.append(self.now())

    def now(self):
        if not self.gpu:
            return time.perf_counter()
        # A GPU notes the time in passing: nobody waits.
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
        for start, end in zip(self.times, self.times[1:]):
            step_time = start.elapsed_time(end) / 1000 if self.gpu else end - start
            self.step_seconds.append(step_time)
        self.record |= {"loss": loss, "accuracy": accuracy}

    def end(self, right, total, **more):
        """After the evaluation. `more` goes into the record, and wins."""
        self.print(f"test accuracy {right / total:.4f} ({right} of {total} images)")
        if not self.args.results or not self.step_seconds:
            return
        failed = self.append_record(right / total, more) if self.rank == 0 else None
        if self.record["ranks"] > 1:
            failed = gather(failed)[0]  # all end, or none
        if failed:
            sys.exit(failed)

    def append_record(self, accuracy, more):
        """One whole line: another's unfinished one is closed. Returns a message if that fails."""
        step_time = statistics.median(self.step_seconds[5:] or self.step_seconds)  # 5 warm up
        bytes_each = 8 if self.args.precision == "fp64" else 4
        self.record |= {"steps": len(self.step_seconds), "step_seconds": step_time,
                        "images_per_second": self.args.global_batch_size / step_time,
                        "gradient_bytes": bytes_each * self.record["parameters"],
                        "peak_memory_bytes": self.peak_memory(), "test_accuracy": accuracy,
                        "total_seconds": time.perf_counter() - STARTED, **more}
        if self.link:  # it may have changed meanwhile
            self.record["link"] = ", then ".join(dict.fromkeys(self.link + link_of_lab()))
        line = json.dumps(self.record)
        try:
            with open(self.args.results, "ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                file.write(f"{line}\n".encode())
        except OSError as problem:  # it could be written to when this training began
            return f"{self.args.results} has not got its record ({problem.strerror}): {line}"
        return None

    def peak_memory(self):
        if self.gpu:
            return self.gpu.max_memory_allocated()
        if self.record["device"] == "cuda":
            return sys.modules["tensorflow"].config.experimental.get_memory_info("GPU:0")["peak"]
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def quiet() -> Iterator[None]:
    """Without standard error: what TensorFlow writes there on import, no variable silences."""
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
