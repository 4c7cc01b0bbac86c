"""Time a minimal training loop on a CPU: always the same batch in memory, no metrics.

    python -m tools.measuring.bare_loop --dataset digits --model cnn --max-steps 155 --results FILE
"""

import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torchvision.models import get_model

from cluster.records import append_records
from workshop.flags import Parser

WARM_UP_STEPS, LR = 5, 0.05
IMAGE_SIDES = {"digits": 8, "synthetic": 32}  # pixels


def make_network(name: str, channels: int, side: int) -> nn.Module:
    """Return chapter 1's cnn, or one of torchvision's networks."""
    if name != "cnn":
        return get_model(name, num_classes=10)
    pooled = (side - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * pooled * pooled, 128), nn.ReLU(),
        nn.Linear(128, 10))


def main():
    parser = Parser(__doc__)
    parser.add_argument("--dataset", choices=IMAGE_SIDES, default="digits")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-steps", type=int, default=155)
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()
    channels = 1 if args.dataset == "digits" and args.model == "cnn" else 3
    side = IMAGE_SIDES[args.dataset]

    images = torch.randn(args.batch_size, channels, side, side)
    labels = torch.randint(10, (args.batch_size,))
    model = make_network(args.model, channels, side)
    bf16 = args.precision == "bf16"
    if bf16 and args.model != "cnn":
        images = images.to(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    timestamps = [time.perf_counter()]
    for _ in range(args.max_steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
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
