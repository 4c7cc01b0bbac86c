"""What does one rank keep in memory, send and compute in a training step?

    mpiexec -n 2 python -m cluster.footprint 05_zero/fsdp.py --epochs 1     # counts what happens
    python -m cluster.footprint --ranks 1024 05_zero/fsdp.py FLAGS          # as one of 1,024 ranks
    python -m cluster.footprint --ranks 64 --gpus-per-node 4 my_train.py FLAGS

The script runs, unchanged, to the end of its second optimizer step. With --ranks it runs as one
rank of a pretended job: first on fake tensors, which have shapes and no memory, and then, if this
computer can do it, on real ones. What it would write, download or send by Python or PyTorch is not.
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path

from cluster.footprint.report import add_links, check_collectives, show
from cluster.launch import end_on_sigterm
from workshop.devices import gather
from workshop.ending import run
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
    if min(args.ranks or 1, args.gpus_per_node, args.seconds) < 1:
        parser.error("--ranks, --gpus-per-node and --seconds: use at least 1")
    if args.ranks and not 0 <= args.rank < args.ranks:
        parser.error(f"--rank {args.rank}: {args.ranks} ranks count from 0")
    if args.ranks and args.ranks > args.gpus_per_node and args.ranks % args.gpus_per_node:
        parser.error(f"--ranks {args.ranks}: use a multiple of --gpus-per-node "
                     f"{args.gpus_per_node}, or fewer ranks than that")
    if not os.path.isfile(args.script):
        parser.error(f"{args.script}: no such file")
    refuse_unwritable(args.results)
    return args


def watch_real_rank(args):
    """Run the script on this rank, among those that the launcher has started; does not return."""
    import torch.distributed as dist

    from cluster.footprint.watch import Watch, run_script
    start = time.monotonic()

    def end():
        _, rank, ranks = find_launcher()
        footprint = watch.footprint | {"rank": rank, "tensors": "real", "pretended": False}
        if problem := check_collectives(footprint, ranks):  # no exception: the script might print
            if rank == 0:
                print(f"footprint: {problem}", file=sys.stderr, flush=True)
            os._exit(2)
        add_links(footprint, gather(socket.gethostname()))
        footprints = gather(footprint)
        if rank == 0:
            show(args, footprints, time.monotonic() - start)
        if dist.is_initialized():
            dist.barrier()  # rank 0 hosts the store and leaves last
        sys.stdout.flush()
        os._exit(0)  # the script's own ending would save files

    watch = Watch(end)
    watch.install()
    problem = run_script(args, [watch])
    sys.argv[0] = "footprint"
    sys.exit(problem)


def main():
    args = parse_args()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a compiled function would hide its operations
    if not args.ranks:
        watch_real_rank(args)
    from cluster.footprint.child import footprint_of
    end_on_sigterm()
    start = time.monotonic()
    show(args, [footprint_of(args)], time.monotonic() - start)


if __name__ == "__main__":
    run(main)
