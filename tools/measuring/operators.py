"""Print where the time of a training step goes: chapter 1's cnn, on one thread of a CPU, by PyTorch's profiler.

    python tools/measuring/operators.py
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[2] / "01_single_node"))
from main import build_model  # noqa: E402  found only now

STEPS, BATCH, PIXELS = 10, 64, 32
KINDS = {"convolutions": "conv", "max-pooling": "max_pool", "ReLU": "relu clamp_min threshold",
         "linear layers": "addmm aten::mm"}  # what their operators' names hold


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randint(10, (BATCH,))
    model = build_model("cnn", images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    step()  # warms up
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            step()
    times = Counter()
    for event in profile.key_averages():
        kind = next((kind for kind, names in KINDS.items() if any(name in event.key for name in names.split())), "the rest")
        times[kind] += event.self_cpu_time_total  # without what it calls
    print(f"cnn, {PIXELS} x {PIXELS} pixels, batch {BATCH}: {STEPS} steps on one thread")
    for kind in [*KINDS, "the rest"]:
        print(f"{kind:13} {times[kind] / times.total():5.0%}")


if __name__ == "__main__":
    main()
