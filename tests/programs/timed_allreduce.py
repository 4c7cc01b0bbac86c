"""Seconds of gloo's all-reduce for each of so many megabytes, the fastest of three, as a JSON list: by rank 0."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "03_ddp"))
from ranks import find_ranks, run


def seconds(megabytes):
    tensor = torch.ones(max(1, int(float(megabytes) * 1e6 / 4)))
    times = []
    for _ in range(3):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - started)
    return min(times)  # others may compute meanwhile, and nothing makes the wire faster


def main():
    find_ranks()
    dist.init_process_group("gloo")
    times = [seconds(megabytes) for megabytes in sys.argv[1:]]
    if os.environ["RANK"] == "0":
        print(json.dumps(times))
    dist.barrier()


run(main)
