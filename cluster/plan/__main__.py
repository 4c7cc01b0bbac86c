"""Which layout, how many GPUs, how long: a plan of a training, and how wrong such plans are.

    python -m cluster.plan --layers 32 --width 4096 --heads 32 --context 4096 --vocabulary 32000 \\
        --gpu h100 --gpus 64 --global-batch-tokens 1M --tokens 100B      # a transformer, by sizes
    python -m cluster.plan --footprint footprint.json --gpu a100-40 --gpus 8 64 512  # any program
    python -m cluster.plan --check                              # predict published runs

README.md of this folder's parent explains the output.
"""

import argparse
import re
import signal
import sys
from pathlib import Path

from cluster.plan import report
from cluster.plan.transformer import Transformer
from cluster.records import read_records
from workshop.flags import Parser
from workshop.gpus import read_gpus

SIZES = "layers", "width", "heads", "context", "vocabulary"


def amount(text: str) -> float:
    """Return the number that "1M", "2.5B" or "1e6" stands for."""
    match = re.fullmatch(r"([\d.e+]+)([kMBT]?)", text)
    if not match or not 0 < float(match[1]) < 1e30:
        raise ValueError
    return float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]]


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


amount.__name__, count.__name__ = "number above 0, such as 1M or 100B,", "number of at least 1"


def make_parser() -> Parser:
    parser = Parser(__doc__, prog="cluster.plan", epilog=__doc__.partition("\n\n")[2],
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    model = parser.add_argument_group("a transformer").add_argument
    for name in SIZES:
        model(f"--{name}", type=count, metavar="N")
    model("--kv-heads", type=count, default=0, metavar="N", help="heads of keys and values (all)")
    model("--ffn", type=count, default=0, metavar="N", help="width of the MLP (4 x width)")
    model("--gated", action="store_true", help="three matrices in the MLP, as Llama has")
    model("--tied", action="store_true", help="the output layer has the embedding's matrix")
    model("--global-batch-tokens", type=amount, metavar="TOKENS", help="tokens of a step, as 1M")
    model("--tokens", type=amount, help="tokens of the whole training, as 100B")
    add("--footprint", type=Path, metavar="FILE", help="plan a program that footprint has counted")
    add("--check", action="store_true", help="predict published runs")
    add("--gpu", choices=sorted(read_gpus()), help="of workshop/gpus.csv")
    add("--gpus", type=count, nargs="+", metavar="N", help="numbers of GPUs")
    add("--gpus-per-node", type=count, metavar="N", help="(the GPU's usual number)")
    add("--node-link", type=amount, metavar="BYTES/S",
        help="bandwidth of a node, all its cards: 100e9 is 4 x 200 Gbit/s (the GPU's usual node)")
    add("--gpu-link", type=amount, metavar="BYTES/S", help="of a GPU to the others of its node")
    add("--speed", type=amount, metavar="FACTOR",
        help="measured over predicted speed of a run of yours: calibrates all others (1)")
    return parser


def parse_args():
    sys.argv[0] = "cluster.plan"  # the name in messages
    parser = make_parser()
    args = parser.parse_args()
    if bool(args.layers) + bool(args.footprint) + args.check != 1:
        parser.error("give one of --layers N (with the model's other sizes), --footprint FILE or "
                     "--check")
    if args.check:
        return args
    if not args.gpu:
        parser.error(f"--gpu: give one of {', '.join(read_gpus())}")
    if not args.gpus:
        parser.error("--gpus: give one or more numbers of GPUs")
    args.gpus = sorted(set(args.gpus))
    args.gpu = read_gpus()[args.gpu]
    for name in "gpus_per_node", "node_link", "gpu_link":
        setattr(args, name, getattr(args, name) or getattr(args.gpu, name))
    for number in args.gpus:
        if number > args.gpus_per_node and number % args.gpus_per_node:
            parser.error(f"--gpus {number}: not whole nodes of {args.gpus_per_node}; change it or "
                         "--gpus-per-node")
    if args.footprint:
        read_footprints(parser, args)
    else:
        check_transformer(parser, args)
    return args


def check_transformer(parser, args):
    missing = [name for name in (*SIZES, "global_batch_tokens") if not getattr(args, name)]
    if missing:
        parser.error("give also " + " ".join(f"--{name.replace('_', '-')}" for name in missing))
    args.model = Transformer(*(getattr(args, name) for name in SIZES), args.kv_heads, args.ffn,
                             args.gated, args.tied)
    if args.width % args.heads or args.heads % (args.kv_heads or 1):
        parser.error(f"--heads {args.heads}: it has to divide --width {args.width}, and --kv-heads "
                     "has to divide it")
    if args.global_batch_tokens < args.context:
        parser.error(f"--global-batch-tokens {args.global_batch_tokens:,.0f}: below one sequence "
                     f"of --context {args.context}")
    if args.tokens and args.tokens < args.global_batch_tokens:
        parser.error(f"--tokens {args.tokens:,.0f}: below one step of --global-batch-tokens "
                     f"{args.global_batch_tokens:,.0f}")


def read_footprints(parser, args):
    if not args.footprint.is_file():
        parser.error(f"{args.footprint}: no such file")
    args.footprints = [record for record in read_records(args.footprint.absolute())
                       if {"ranks", "memory", "sent", "flops"} <= set(record)]
    if not args.footprints:
        parser.error(f"{args.footprint}: no record of python -m cluster.footprint --results FILE")
    if args.gpus[-1] > max(record["ranks"] for record in args.footprints) == 1:
        parser.error(f"{args.footprint} counts one rank, which sends nothing: add a record of "
                     "cluster.footprint --ranks N")


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    args = parse_args()
    if args.check:
        report.show_check()
    elif args.footprint:
        report.show_footprint(args)
    else:
        report.show_transformer(args)


if __name__ == "__main__":
    main()
