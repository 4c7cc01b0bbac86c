"""The flags that all chapters share, and the checks of their values and of checkpoints."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workshop.devices import gather
from workshop.ranks import find_launcher

SIDES = {"digits": 8, "mnist": 28, "svhn": 32, "synthetic": 32}  # height and width of the images


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, whose errors are one line, from rank 0, with exit code 2."""

    def __init__(self, doc: str, **options: object):
        super().__init__(description=doc.splitlines()[0], allow_abbrev=False, **options)

    def error(self, message):
        if find_launcher()[1] == 0:  # all ranks have the same flags, so only rank 0 prints
            print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
        sys.exit(2)


def make_parser(doc: str, lr: float) -> Parser:
    """Return a parser for the flags of the chapters on images. lr: the default of --lr."""
    parser = Parser(doc)
    add = parser.add_argument
    add("--dataset", choices=("digits", "mnist", "svhn", "synthetic"), default="digits")
    add("--data-dir", default="data", help="folder of MNIST and SVHN, downloaded if missing (data)")
    add("--image-size", type=below(10**4),
        help="height and width of digits (8) and synthetic images (32)")
    add_training_flags(parser, lr, "images", batch_size=64, epochs=5)
    return parser


def make_gpt_parser(doc: str, lr: float) -> Parser:
    """Return a parser for the flags of chapter 5's programs. lr: the default of --lr."""
    parser = Parser(doc)
    add = parser.add_argument
    add("--text", metavar="FILE", help="text to train on (Python's own documentation); "
        "synthetic: random letters, 50 steps per epoch")
    add("--layers", type=int, default=3, help="transformer blocks (3)")
    add("--width", type=int, default=96, help="numbers per token between the blocks (96)")
    add("--heads", type=int, default=4, help="attention heads per block, a divisor of --width (4)")
    add("--context", type=int, default=64, help="tokens, which are bytes, per sequence (64)")
    add("--activation-checkpointing", action="store_true",
        help="keep only the input of each block; backward computes the rest again")
    add_training_flags(parser, lr, "sequences", batch_size=16, epochs=2)
    return parser


def add_training_flags(parser, lr, samples, batch_size, epochs):
    add = parser.add_argument
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--batch-size", type=int, default=batch_size,
                       help=f"{samples} per rank and step ({batch_size})")
    batch.add_argument("--global-batch-size", type=int, help=f"{samples} per step on all ranks")
    add("--epochs", type=int, default=epochs)
    add("--max-steps", type=int, default=sys.maxsize, help="stop after this many steps")
    add("--lr", type=float, default=lr,
        help=f"learning rate for a global batch of 256 {samples}; other batches scale it ({lr})")
    add("--warmup-epochs", type=float, default=0, help="epochs of rising learning rate (0)")
    add("--seed", type=below(2**32), default=0)
    add("--device", choices=("auto", "cpu", "gpu"), default="auto")
    add("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    add("--checkpoint", metavar="PATH", help="file or folder to save to after each whole epoch")
    add("--resume", nargs="?", const=True, choices=("auto",), metavar="auto",
        help="continue from --checkpoint; with auto, start at step 0 if there is none")
    add("--timeout", type=below(10**8), default=1800, metavar="SECONDS",
        help="abort the job if a rank waits longer for another (1800)")
    add("--results", metavar="FILE", help="append one JSON line with what was measured")
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # added by deepspeed's launcher


def below(limit: int) -> Callable[[str], int]:
    """Return a type for argparse: a whole number below the limit."""
    def whole_number(text):
        if int(text) >= limit:
            raise argparse.ArgumentTypeError(f"has to be below {limit}")
        return int(text)

    return whole_number


def check(args: argparse.Namespace, device: str, global_batch: int, parts: int = 1,
          precision: str | None = None) -> None:
    """Exit with a one-line message if a flag's value is impossible, or if work could be lost.

    Without --image-size, set args.image_size to the data set's own.
    parts: into how many equal batches the global batch is split. precision: the one in use, if
    not that of --precision.
    """
    if "image_size" in args:
        if args.image_size and args.dataset in ("mnist", "svhn"):
            sys.exit(f"--image-size: {args.dataset} has images of {SIDES[args.dataset]} pixels; "
                     "only digits and synthetic images have other sizes")
        args.image_size = args.image_size or SIDES[args.dataset]
    minimums = {"batch_size": 1, "epochs": 1, "max_steps": 1, "timeout": 1, "seed": 0, "layers": 1,
                "width": 1, "heads": 1, "context": 1, "image_size": 6, "warmup_epochs": 0}
    for name in minimums.keys() & vars(args).keys():
        if not minimums[name] <= getattr(args, name) < math.inf:
            sys.exit(f"--{name.replace('_', '-')} has to be {minimums[name]} or more")
    if not 0 < args.lr < 1e30:
        sys.exit("--lr has to be above 0, below 1e30")
    if global_batch < 1 or global_batch % parts:
        sys.exit(f"--global-batch-size: {global_batch} is not a multiple of {parts}: ranks x "
                 "accumulation steps")
    if "heads" in args and args.width % args.heads:
        sys.exit(f"--width {args.width} is not a multiple of --heads {args.heads}")
    is_bf16_on_cpu = device == "cpu" and (precision or args.precision) == "bf16"
    if is_bf16_on_cpu and "resnet" in getattr(args, "model", "") and args.image_size <= 16:
        sys.exit("--precision bf16: on CPUs PyTorch gives a ResNet random gradients for images of "
                 "up to 16 x 16 pixels: use fp32, or larger images")
    for name in ("results", "profile"):
        refuse_unwritable(getattr(args, name, None))
    refuse_unwritable(args.checkpoint, may_be_folder="workshop.checkpoints" in sys.modules)
    if args.resume and not args.checkpoint:
        sys.exit("--resume: name the file to continue from, with --checkpoint")
    if args.resume and len({*gather(has_checkpoint(args))}) > 1:
        sys.exit(f"--resume: not every rank sees {args.checkpoint}: all nodes need the same disk")
    if args.resume is True and not has_checkpoint(args):
        sys.exit(f"there is no checkpoint {args.checkpoint}: remove --resume")
    if args.checkpoint and not args.resume and os.path.exists(args.checkpoint):
        sys.exit(f"{args.checkpoint} exists: continue with --resume, or remove it")


def refuse_unwritable(path: str | os.PathLike | None, may_be_folder: bool = False) -> None:
    if not path:
        return
    names_folder = os.path.isdir(path) or os.fspath(path).endswith("/")
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    if (names_folder and not may_be_folder) or not os.access(folder, os.W_OK):
        sys.exit(f"cannot write {path}: name a file in a folder that you may write to")


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
