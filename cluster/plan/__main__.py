"""Which layout, how many GPUs, how long: a plan of a training, and how wrong such plans are.

    python -m cluster.plan --layers 32 --width 4096 --heads 32 --context 4096 --vocabulary 32000 \\
        --gpu h100 --gpus 64 --global-batch-tokens 1M --tokens 100B      # a transformer, by sizes
    python -m cluster.plan --footprint footprint.json --gpu a100-40 --gpus 8 64 512  # any program
    python -m cluster.plan --measured run.jsonl --links doctor.jsonl --gpus 8 64 512 # DDP, by a run
    python -m cluster.plan --check [FILE.csv]                   # predict published runs

README.md of this folder's parent explains the output.
"""

import argparse
import math
import re
import shlex
import signal
import sys
from pathlib import Path

from cluster.launch import ROOT
from cluster.plan import report
from cluster.plan.check import PUBLISHED, read_runs
from cluster.plan.measured import is_complete, measured_link, step_times
from cluster.plan.transformer import Transformer
from cluster.records import read_records
from workshop.flags import Parser
from workshop.gpus import read_gpus

SIZES = "layers", "width", "heads", "context", "vocabulary"


def amount(text: str) -> float:
    """Return the number that "1M", "2.5B" or "1e6" stands for."""
    match = re.fullmatch(r"([\d.e+]+)([kMBT]?)", text)
    if not match or float(match[1]) <= 0:
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
    add("--measured", type=Path, metavar="FILE", help="plan DDP from a run on one GPU or one node")
    add("--check", type=Path, nargs="?", const=PUBLISHED, metavar="FILE.csv",
        help="predict the runs of a file in the form of published_llm.csv")
    add("--gpu", choices=sorted(read_gpus()), help="of workshop/gpus.csv")
    add("--gpus", type=count, nargs="+", metavar="N", help="numbers of GPUs")
    add("--gpus-per-node", type=count, metavar="N", help="(the GPU's usual number)")
    add("--node-link", type=amount, metavar="BYTES/S",
        help="bandwidth of a node, all its cards: 100e9 is 4 x 200 Gbit/s (the GPU's usual node)")
    add("--gpu-link", type=amount, metavar="BYTES/S", help="of a GPU to the others of its node")
    add("--site", metavar="NAME", help="take the links from a file of submit/sites, or from a path")
    add("--links", type=Path, metavar="FILE", help="records of doctor.py --results on two nodes")
    add("--speed", type=amount, metavar="FACTOR",
        help="measured over predicted speed of a run of yours: calibrates all others (1)")
    add("--markdown", action="store_true", help="print the table for a proposal")
    run = parser.add_argument_group("with --measured").add_argument
    run("--epochs", type=count, default=1, help="epochs to train (1)")
    run("--samples", type=count, help="samples per epoch (those of the record)")
    run("--largest-batch", type=amount, default=math.inf,
        help="largest global batch that reaches the same accuracy (the whole data set)")
    return parser


def parse_args():
    sys.argv[0] = "cluster.plan"  # the name in messages
    parser = make_parser()
    args = parser.parse_args()
    if args.site:
        path = Path(args.site)
        if "/" not in args.site:
            path = ROOT / "submit" / "sites" / f"{args.site}.sh"
        flags = re.search("^# plan: (.*)", path.read_text() if path.exists() else "", re.M)
        if not flags:
            parser.error(f"--site {args.site}: {path} has no line '# plan: --gpus-per-node ...'")
        args = parser.parse_args([*shlex.split(flags[1], comments=True), *sys.argv[1:]])
    modes = [name for name in ("check", "footprint", "measured", "layers") if getattr(args, name)]
    if len(modes) != 1:
        parser.error("give one of --layers N (with the model's other sizes), --footprint FILE, "
                     "--measured FILE or --check")
    args.mode = modes[0]
    for path in args.check, args.footprint, args.measured, args.links:
        if path and not path.is_file():
            parser.error(f"{path}: no such file")
    if args.check:
        try:
            args.runs, args.reasons = read_runs(args.check)
        except ValueError as problem:  # also what pandas raises
            parser.error(f"--check {args.check}: not in the form of {PUBLISHED.name}: "
                         f"{str(problem).strip()}")
        if not any(run.tokens_per_second for run in args.runs):
            parser.error(f"--check {args.check}: no row that the model can predict: "
                         f"{'; '.join(args.reasons) or 'no tokens/s'}")
        return args
    if not args.gpus:
        parser.error("--gpus: give one or more numbers of GPUs")
    args.gpus = sorted(set(args.gpus))
    if args.gpu:
        gpu = read_gpus()[args.gpu]
        for name in "gpus_per_node", "node_link", "gpu_link":
            setattr(args, name, getattr(args, name) or getattr(gpu, name))
        args.gpu = gpu
    elif args.mode != "measured":
        parser.error(f"--gpu: give one of {', '.join(read_gpus())}")
    {"layers": check_transformer, "footprint": check_footprint, "measured": check_measured}[
        args.mode](parser, args)
    for number in args.gpus:
        if number > args.gpus_per_node and number % args.gpus_per_node:
            parser.error(f"--gpus {number}: not whole nodes of {args.gpus_per_node}; change it or "
                         "--gpus-per-node")
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
    if args.tokens is not None and args.tokens < args.global_batch_tokens:
        parser.error(f"--tokens {args.tokens:,.0f}: below one step of --global-batch-tokens "
                     f"{args.global_batch_tokens:,.0f}")


def check_footprint(parser, args):
    args.footprints = [record for record in read_records(args.footprint.absolute())
                       if {"ranks", "memory", "sent", "flops"} <= set(record)]
    if not args.footprints:
        parser.error(f"{args.footprint}: no record of python -m cluster.footprint --results FILE")


def check_measured(parser, args):
    records = [record for record in read_records(args.measured.absolute()) if is_complete(record)]
    if not records or records[-1]["nodes"] > 1:
        parser.error(f"{args.measured}: no record of a run on one node: a chapter's --results, or "
                     "a line of JSON with nodes, ranks, global_batch_size, step_seconds and "
                     "gradient_bytes, all above 0")
    args.record, args.times = records[-1], step_times(records)
    args.gpus_per_node = args.gpus_per_node or 4
    args.gpu_link = args.gpu_link or 300e9
    args.samples = args.samples or args.record.get("images")
    if not args.samples:
        parser.error("--samples N: the record has no `images`, the samples per epoch")
    args.largest_batch = min(args.largest_batch, args.samples)
    args.level_seconds = None  # latency per level of a tree
    if args.links:
        try:
            args.node_link, args.level_seconds = measured_link(read_records(args.links.absolute()))
        except ValueError as problem:
            parser.error(f"--links {args.links}: {problem}")
    if not args.node_link:
        parser.error("--node-link: give the bandwidth of a node, or --site, --links or --gpu")
    if args.largest_batch < args.gpus[0]:
        parser.error("--largest-batch: at least one sample per GPU")


def main():
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    args = parse_args()
    {"check": report.show_check, "layers": report.show_transformer,
     "footprint": report.show_footprint, "measured": report.show_measured}[args.mode](args)


if __name__ == "__main__":
    main()
