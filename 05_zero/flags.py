"""The flags of this chapter: those of every program, ZeRO's stage and the perceptron's size."""

import argparse
import sys

import workshop


def parse_args(doc: str, stages: tuple[int, ...], stage: int) -> argparse.Namespace:
    """The flags of main.py or fsdp.py, which have these stages; this one where none is given."""
    parser = workshop.make_parser(doc, lr=0.002)
    add = parser.add_argument
    add("--stage", type=int, choices=stages, default=stage, help=f"of ZeRO ({stage})")
    add("--width", type=workshop.whole, default=1024, help="outputs of each layer (1024)")
    add("--layers", type=workshop.whole, default=10, help="between the first and the last (10)")
    add("--offload", choices=("none", "cpu"), default="none",
        help="where the optimizer's part is (none)")
    return parser.parse_args()


def check_stage(args: argparse.Namespace, device: str, offloads: tuple[int, ...],
                saves: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """Exit where the flags do not go together: stages can be offloaded, and saved."""
    if args.offload == "cpu" and device != "cuda":
        sys.exit("--offload cpu: here is no GPU whose memory it could save")
    if args.offload == "cpu" and args.stage not in offloads:
        sys.exit(f"--offload cpu: only with --stage {', '.join(map(str, offloads))}")
    if args.checkpoint and args.stage not in saves:
        sys.exit(f"--checkpoint: only with --stage {', '.join(map(str, saves))}")
