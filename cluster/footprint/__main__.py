"""What does one rank keep in memory, send and compute in a training step?

    mpiexec -n 2 python -m cluster.footprint 05_zero/fsdp.py --epochs 1     # counts what happens
    python -m cluster.footprint --ranks 1024 05_zero/fsdp.py FLAGS          # as one of 1,024 ranks
    python -m cluster.footprint --ranks 64 --gpus-per-node 4 my_train.py FLAGS

The script runs, unchanged, to the end of its second optimizer step. With --ranks it runs as one
rank of a pretended job: first on fake tensors, which have shapes and no memory, and then, if this
computer can do it, on real ones. Nothing is written, downloaded or sent.
"""

import argparse
import os
import runpy
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from cluster.footprint.internals import check_internals
from cluster.footprint.report import Refusal, add_places, check_collectives, show
from workshop.flags import Parser, refuse_unwritable
from workshop.ranks import find_launcher


def parse_args():
    sys.argv[0] = "footprint"  # the name in messages
    parser = Parser(__doc__, prog="footprint", epilog=__doc__.partition("\n\n")[2],
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, help="pretend so many ranks (without: those of the launcher)")
    add("--rank", type=int, default=0, help="the pretended rank (0)")
    add("--gpus-per-node", type=int, default=4, help="ranks on a pretended node (4)")
    add("--tensors", choices=("real", "fake"), help="of a pretended rank (fake, then real if this "
        "computer can do it)")
    add("--seconds", type=float, default=600, help="limit for a pretended rank (600)")
    add("--results", type=Path, help="file to which a line of JSON per rank is appended")
    add("script")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="flags of the script")
    args = parser.parse_args()
    if args.ranks is None and (args.rank or args.tensors):
        parser.error("--rank and --tensors need --ranks")
    for flag in "ranks", "gpus_per_node", "seconds":
        value = getattr(args, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag.replace('_', '-')} {value}: use at least 1")
    if args.ranks and not 0 <= args.rank < args.ranks:
        parser.error(f"--rank {args.rank}: {args.ranks} ranks count from 0")
    if args.ranks and args.ranks > args.gpus_per_node and args.ranks % args.gpus_per_node:
        parser.error(f"--ranks {args.ranks}: use a multiple of --gpus-per-node "
                     f"{args.gpus_per_node}, or fewer ranks than that")
    if not os.path.isfile(args.script):
        parser.error(f"{args.script}: no such file")
    try:
        refuse_unwritable(args.results)
    except SystemExit as refusal:
        parser.error(refusal.code)
    return args


def run_script(args, modes):
    """Run the script under the modes. It should not return, because its second step ends it."""
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(args.script)))
    try:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            runpy.run_path(args.script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    raise Refusal(f"{args.script} ended before its second optimizer step: give it more steps "
                  "(or it does not use torch.optim, or not in this process)")


def watch_real_ranks(args):
    """Run the script on this rank, among those that the launcher has started; does not return."""
    import torch.distributed as dist

    from cluster.footprint.watch import Watch
    start = time.monotonic()

    def end():
        _, rank, ranks = find_launcher()
        footprint = watch.footprint | {"rank": rank, "tensors": "real", "pretended": False}
        try:
            check_collectives(footprint, ranks)
        except Refusal as refusal:  # not raised, because the script would print a traceback
            refuse(refusal, rank)
        footprints = add_places(footprint)
        if rank == 0:
            show(args, footprints, time.monotonic() - start)
        if dist.is_initialized():
            dist.barrier()  # rank 0 hosts the store and leaves last
        sys.stdout.flush()
        os._exit(0)  # the script's own ending would save files

    watch = Watch(end)
    watch.install()
    run_script(args, [watch])


def refuse(refusal, rank):
    """Print the refusal on rank 0; exit with code 2."""
    if rank == 0:
        print(f"footprint: {refusal}", file=sys.stderr, flush=True)
    os._exit(2)


def main():
    args = parse_args()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a compiled function would hide its operations
    try:
        check_internals()
        if args.ranks:
            from cluster.footprint.child import footprint_of
            start = time.monotonic()
            show(args, [footprint_of(args, run_script)], time.monotonic() - start)
        else:
            watch_real_ranks(args)
    except Refusal as refusal:
        refuse(refusal, find_launcher()[1])
    except KeyboardInterrupt:
        sys.exit("footprint: interrupted")


if __name__ == "__main__":
    main()
