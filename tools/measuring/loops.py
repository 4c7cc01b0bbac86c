"""Trace the loop of chapter 1 on the CPU: it reads its images itself, or workers do.

    python -m tools.measuring.loops    # records: assets/records/loops.jsonl

The network is chapter 1's. Reading an image takes as long as from a slow disk: it sleeps.
"""

import importlib
import time

import torch
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader

from cluster.records import RECORDS, describe_machine
from cluster.study import run_study, watch_load

NAMES = {"enumerate": "data", "forward": "forward", "backward": "backward",
         "Optimizer.step": "optimizer"}  # a part of an event's name: what it is


class SlowImages(torch.utils.data.Dataset):
    def __len__(self):
        return 64 * 12

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((3, 16, 16), index / len(self)), index % 10


def measure(workers: int) -> dict:
    """Return when three steps, after six, load data and compute, in microseconds."""
    torch.set_num_threads(1)
    model = importlib.import_module("01_single_node.main").build_model("cnn", (3, 16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.profiler.schedule(wait=5, warmup=1, active=3, repeat=1)
    with watch_load() as load, profile(schedule=schedule, acc_events=True) as profiler:
        for images, labels in DataLoader(SlowImages(), batch_size=64, num_workers=workers):
            with record_function("forward"):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            with record_function("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    spans = [[name, event.time_range.start, event.time_range.end] for event in profiler.events()
             for part, name in NAMES.items() if event.name.startswith(part)]
    begin = min(start for _, start, _ in spans)
    return {"spans": [[name, round(start - begin), round(end - begin)]
                      for name, start, end in sorted(spans, key=lambda span: span[1])],
            **describe_machine(), **load}


if __name__ == "__main__":
    run_study(RECORDS / "loops.jsonl", [{"workers": workers} for workers in (0, 2)], measure)
