"""Time the same GPT under DDP and under FSDP, in turn: same batches, precision and optimizer.

    mpiexec -n 2 python ddp_and_fsdp.py --width 96

On CPUs, in fp32.
"""

import json
import statistics
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp import shard
from transformer import parts
from workshop.ending import run
from workshop.flags import Parser
from workshop.ranks import find_ranks

LAYERS, CONTEXT, BATCH = 3, 64, 8  # BATCH: sequences per rank, of CONTEXT bytes
WARM_UP, STEPS = 3, 30  # warm-up steps create Adam's moments and DDP's buckets


def make_model(wrapper, shape):
    """Return the network; the parameters are the same under both wrappers."""
    torch.manual_seed(0)
    if wrapper == "DDP":
        return DistributedDataParallel(nn.Sequential(*parts(**shape)))
    with torch.device("meta"):
        model = nn.Sequential(*parts(**shape))
    args = SimpleNamespace(precision="fp32", offload="none")
    return shard(model, parts(**shape), args, torch.device("cpu"))


def train_step(model, optimizer, text):
    """Train one step; return its seconds and its loss."""
    dist.barrier()  # no rank begins early
    start = time.perf_counter()
    optimizer.zero_grad()
    logits = model(text[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return time.perf_counter() - start, loss.item()


def main():
    rank, world_size, _ = find_ranks()
    parser = Parser(__doc__)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--wrapper", choices=("DDP", "FSDP"), help="only one of them (both)")
    parser.add_argument("--results", metavar="FILE", help="append one JSON line with all times")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    shape = {"layers": LAYERS, "width": args.width, "heads": 4, "context": CONTEXT}
    wrappers = [args.wrapper] if args.wrapper else ["DDP", "FSDP"]
    models = {wrapper: make_model(wrapper, shape) for wrapper in wrappers}
    optimizers = {wrapper: torch.optim.Adam(model.parameters(), lr=1e-3)
                  for wrapper, model in models.items()}
    seconds, losses = {wrapper: [] for wrapper in wrappers}, {}
    generator = torch.Generator().manual_seed(rank)  # other sequences on each rank
    for step in range(WARM_UP + STEPS):
        text = torch.randint(256, (BATCH, CONTEXT + 1), generator=generator)
        for wrapper in wrappers:
            elapsed, losses[wrapper] = train_step(models[wrapper], optimizers[wrapper], text)
            if step >= WARM_UP:
                seconds[wrapper].append(round(elapsed, 5))
    if rank == 0:
        parameters = sum(weight.numel() for weight in models[wrappers[0]].parameters())
        print(f"GPT: {parameters:,} parameters, fp32, CPU, {world_size} ranks, "
              f"{BATCH} sequences each")
        for wrapper, times in seconds.items():
            low, median, high = (1000 * of(times) for of in (min, statistics.median, max))
            print(f"{wrapper:5} loss {losses[wrapper]:.4f}, ms per step: median "
                  f"{median:.1f}, {low:.1f} to {high:.1f}")
        if args.results:
            record = {"ranks": world_size, "parameters": parameters, "batch_size": BATCH,
                      "seconds": seconds}
            with open(args.results, "a") as file:
                file.write(f"{json.dumps(record)}\n")
    dist.barrier()  # rank 0 runs the rendezvous server (the store) and has to leave last


if __name__ == "__main__":
    run(main)
