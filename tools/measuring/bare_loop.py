"""Time a minimal training loop on a CPU: always the same batch in memory, no metrics.

    python -m tools.measuring.bare_loop --dataset digits --model cnn --max-steps 155 --results FILE
"""

import runpy
import statistics
import time

import torch
from torch import nn

from cluster.launch import ROOT
from cluster.records import append_records
from workshop.flags import make_parser

WARM_UP_STEPS = 5


def main():
    parser = make_parser(__doc__, lr=0.05)
    parser.add_argument("--model", default="cnn")
    args = parser.parse_args()
    build_model = runpy.run_path(str(ROOT / "01_single_node" / "main.py"))["build_model"]
    channels = 1 if args.dataset == "digits" and args.model == "cnn" else 3
    side = 8 if args.dataset == "digits" else args.image_size

    images = torch.randn(args.batch_size, channels, side, side)
    labels = torch.randint(10, (args.batch_size,))
    model = build_model(args.model, images.shape[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    timestamps = [time.perf_counter()]
    for _ in range(args.max_steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        timestamps.append(time.perf_counter())

    step_times = [end - begin for begin, end in zip(timestamps, timestamps[1:])]
    step_seconds = statistics.median(step_times[WARM_UP_STEPS:])
    append_records(args.results, {"chapter": "bare loop", "step_seconds": step_seconds,
                                  "images_per_second": args.batch_size / step_seconds})


if __name__ == "__main__":
    main()
