"""Check a node's GPUs: do the chapters train as on a CPU, how fast, and as predicted?

    python tests/gpu                      # all parts; make gpu does the same
    python tests/gpu nccl                 # correctness; or some of the parts, as `ddp speed`
    python tests/gpu nccl --device cpu    # a trial of this program, over gloo

It needs torch >= 2.7, torchvision, scikit-learn and psutil in the Python that runs it (predictions
needs pandas, too), and no network. It prints what each part measures, and appends it to --results
as lines of JSON.
"""

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import nccl
from predictions import predictions
from speed import speed

from cluster.launch import ROOT
from cluster.records import append_records, describe_machine
from workshop.flags import Parser

PARTS = {"nccl": nccl.PARTS} | {
    part.__name__: [part] for part in (*nccl.PARTS, speed, predictions)}


def main():
    parser = Parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART",
                        default=["nccl", "speed", "predictions"], help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "gpu.jsonl")
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"unknown part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    gpus = torch.cuda.device_count()
    if args.device == "gpu" and not gpus:
        parser.error("PyTorch sees no GPU: compare nvidia-smi with torch.version.cuda, or try "
                     "--device cpu")
    machine = describe_machine() | {"launcher": "torchrun", "gpus": gpus, "device": args.device}
    print(machine["processor"], f"torch {machine['torch']}", machine["git"], machine["time"])
    args.results.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in [part for name in args.parts for part in PARTS[name]]:
        print(f"\n{part.__name__}: {part.__doc__}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for record in part(nccl.Jobs(args.device, gpus, Path(folder))):
                failed += not record.get("passed", True)
                texts = [f"{key}: {value}" for key, value in record.items() if value != ""]
                print("   ", *texts, sep="   ", flush=True)
                append_records(args.results, {"part": part.__name__, **machine, **record})
    print(f"\n{failed} of the tests failed; {args.results}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
