"""Make a record of exercise 9, the clinic, again.

    python -m tools.measuring.clinic ranks > exercises/9_clinic/records/ranks.txt

This file tells the answers. Each function runs on every rank and returns its part of the record.
Linux only: it stops a process and limits memory.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).resolve().parents[2] / "exercises"))
os.environ |= {"TORCH_FR_BUFFER_SIZE": "100", "KINETO_LOG_LEVEL": "99"}

import scipy.ndimage
import torch
import torch._dynamo  # here, because an optimizer's import would count as memory
import torch.distributed as dist
from runner import on_ranks
from sklearn.datasets import load_digits
from torch import nn
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

EVENTS = ("DistributedDataParallel.forward", "gloo:all_reduce", "Optimizer.step#SGD.step",
          "autograd::engine::evaluate_function: AddmmBackward0")
FIELDS = ("collective_seq_id", "profiling_name", "input_sizes", "time_created_ns", "retired")


def build_mlp(layers, width):
    return nn.Sequential(*(module for _ in range(layers)
                           for module in (nn.Linear(width, width), nn.ReLU())))


def profile(rank):
    """An input gap: without workers a DataLoader prepares a batch while the model waits."""
    images, labels = load_digits(return_X_y=True)

    def prepare(indices):
        enlarged = [scipy.ndimage.zoom(images[index].reshape(8, 8), 4) for index in indices]
        rotated = [scipy.ndimage.rotate(image, 10, reshape=False) for image in enlarged]
        return torch.tensor(rotated).float().unsqueeze(1), torch.tensor(labels[indices])

    model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.profiler.profile() as profiler:
        for batch, targets in DataLoader(range(len(images)), 64, collate_fn=prepare):
            optimizer.zero_grad()
            cross_entropy(model(batch), targets).backward()
            optimizer.step()
    return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=12)


def ranks(rank):
    """A slow rank: rank 2 is throttled, as a GPU is that gets too hot."""
    if rank == 2:
        process = os.pidfd_open(os.getpid())  # no other process can get the signals
        if os.fork() == 0:
            throttle(process)
    model, batch, rows = build_mlp(6, 256), torch.randn(512, 256), []
    for _ in range(25):
        start = time.perf_counter()
        model(batch).square().mean().backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        computed = time.perf_counter()
        dist.all_reduce(gradients)
        rows.append((computed - start, time.perf_counter() - computed))
    computing, reducing = (1e3 * median(column) for column in zip(*rows[5:]))
    return f"{rank:4}{len(batch):9}{computing:20.1f}{reducing:14.1f}"


def throttle(process):
    """Let a process run for a sixth of the time, until it ends."""
    try:
        while True:
            for number, seconds in ((signal.SIGSTOP, 0.005), (signal.SIGCONT, 0.001)):
                signal.pidfd_send_signal(process, number)
                time.sleep(seconds)
    finally:
        os._exit(0)


def trace(rank):
    """No overlap: the only bucket holds all gradients, so it is full when backward ends."""
    model, batch = build_mlp(8, 1024), torch.randn(256, 1024)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train():
        ddp(batch).square().mean().backward()
        optimizer.step()
        dist.barrier()

    for _ in range(3):
        train()
    with torch.profiler.profile(record_shapes=True) as profiler:
        train()
    lines = [f"rank {rank}"]
    for event in profiler.events():
        if event.name in EVENTS:
            start, end = event.time_range.start / 1e3, event.time_range.end / 1e3
            lines.append(f"{start:10.1f}{end:10.1f}  {event.name} {event.input_shapes or ''}")
    return "\n".join(lines)


def memory(rank):
    """Out of memory at the second step, because Adam creates its state in the first."""
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: memory of freed tensors goes back
    start, lines = allocated(), []
    model, batch = build_mlp(8, 1024), torch.randn(2048, 1024)
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
    "profile": (profile, 1, "torch.profiler's key_averages().table(): an epoch, 64 images a step"),
    "ranks": (ranks, 4, "rank   images   forward, backward    all-reduce   [ms, median of 20]"),
    "trace": (trace, 2, "torch.profiler's events of a step: begin and end in ms, name, shapes"),
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
