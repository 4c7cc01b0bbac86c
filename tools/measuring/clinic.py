"""Make the record memory, loss or dump of exercise 9, the clinic, again.

    python -m tools.measuring.clinic memory > exercises/9_clinic/records/memory.txt

This file tells the answers. Each function runs on every rank and returns its part of the record.
Linux only: it limits memory. The programs that made the other three records are in the history:
git show 9efbf05:tools/measuring/clinic.py
"""

import ctypes
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "exercises"))
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"

import torch
import torch._dynamo  # here, because an optimizer's import would count as memory
import torch.distributed as dist
from runner import on_ranks
from sklearn.datasets import load_digits
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.nn.functional import cross_entropy, relu

FIELDS = ("collective_seq_id", "profiling_name", "input_sizes", "time_created_ns", "retired")


def memory(rank):
    """Out of memory at the second step, because Adam creates its state in the first."""
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: memory of freed tensors goes back
    start, lines = allocated(), []
    model = nn.Sequential(*(module for _ in range(8)
                            for module in (nn.Linear(1024, 1024), nn.ReLU())))
    batch = torch.randn(2048, 1024)
    optimizer = torch.optim.Adam(model.parameters())
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    limit = int(start + 4.75 * size)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def log(event):
        lines.append(f"rank {rank}: {event}: {(allocated() - start) / 1e6:.0f} MB")

    log(f"parameters {size / 1e6:.0f} MB, limit {(limit - start) / 1e6:.0f} MB, model built")
    try:
        for step in (1, 2, 3):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            log(f"step {step}, after forward")
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            log(f"step {step}, after backward")
            optimizer.step()
            log(f"step {step}, after optimizer.step()")
    except RuntimeError as error:
        lines.append(f"rank {rank}: RuntimeError: {error}")
    return "\n".join(lines)


def allocated():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])


def loss(rank):
    """NaN in fp16: the activations of squared ReLUs grow beyond its largest number."""
    torch.manual_seed(2)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = ((images - images.mean()) / images.std()).float()
    hidden = nn.ModuleList(nn.Linear(width, 32) for width in (64, 32, 32))
    head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 10))
    for layer in hidden:
        nn.init.kaiming_normal_(layer.weight)
    optimizer = torch.optim.Adam([*hidden.parameters(), *head.parameters()], lr=0.004)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)

    def forward(features, targets):
        for layer in hidden:
            features = relu(layer(features)).square()
        return cross_entropy(head(features), targets), features.max()

    lines = []
    for step in range(1, 81):
        indices, scale = torch.randint(len(images), (32,)), scaler.get_scale()
        batch = images[indices], labels[indices]
        with torch.autocast("cpu", torch.float16):
            loss, largest = forward(*batch)
        fp32_loss, _ = forward(*batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 1 or largest > 35_000:
            lines.append(f"{step:4}{loss:12.3f}{largest:24,.0f}{scale:10g}{fp32_loss:24.3f}")
    return "\n".join(lines)


def dump(rank):
    """A hang: rank 2 waits for data that do not come, and the others wait for rank 2."""
    def train():
        for step in range(20):
            if rank == 2 and step == 17:
                os.read(os.pipe()[0], 1)
            for size in ((10, 64), (10,)):
                dist.all_reduce(torch.ones(size))

    threading.Thread(target=train, daemon=True).start()
    time.sleep(3)
    lines = [f"rank {rank}, dumped at {time.time_ns()}"]
    for entry in json.loads(_dump_fr_trace_json())["entries"][-3:]:
        lines.append(json.dumps({field: entry[field] for field in FIELDS}))
    return "\n".join(lines)


RECORDS = {  # function, number of ranks, heading
    "memory": (memory, 2, "one sequence of 2,048 tokens per rank, fp32; memory that is allocated"),
    "loss": (loss, 1, "autocast in fp16, with GradScaler\n"
             "step        loss      largest activation     scale   same batch in fp32"),
    "dump": (dump, 4, "Flight Recorder: the last three entries of each rank")}


def main():
    function, number, heading = RECORDS[sys.argv[1]]
    parts = on_ranks(Path(__file__).resolve(), function, number)
    for line in "\n".join([heading, *parts]).splitlines():
        print(line.rstrip())


if __name__ == "__main__":
    main()
