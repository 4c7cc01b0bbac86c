"""Chapter 3's training loop with what helps where the link is slow: a program to measure with, started by lab.py.

    submit/lab.sh run -n 2 python -m tools.measuring.slow_link --ways plain fp16 --results /tmp/slow.jsonl
    submit/lab.sh run -n 2 python -m tools.measuring.slow_link --all-reduce 4000 25000000 --results /tmp/slow.jsonl

main.py has no flags for these: its loop stays short. Network, data, batches and ranks are the chapter's own. A step
ends with an update of the parameters; a way's steps are timed in turn with those of the others, and again.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported

import torch
import torch.distributed as dist
from launch import ROOT
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

MAIN = SimpleNamespace(dataset="synthetic", image_size=32, batch_size=64, precision="fp32", lr=0.2, seed=0)  # its flags
WARM_UP = 2  # steps: after the first, DDP makes its buckets anew


@dataclass(frozen=True)
class Way:
    """How the gradients of a step travel; images: those of a step beside main.py's."""
    said: str
    compress: bool = False
    accumulate: int = 1
    batch: int = 1
    bucket: int | None = None  # MB; None: DDP's own, the first of 1 MB, the others of 25 MB

    @property
    def images(self) -> int:
        return self.accumulate * self.batch


WAYS = {"plain": Way("as main.py has it"),
        "fp16": Way("gradients travel as fp16", compress=True),
        "accumulate": Way("4 batches added up, no_sync", accumulate=4),
        "batch": Way("a batch 4 times as large", batch=4),
        "bucket": Way("buckets of 1 MB", bucket=1),
        "one": Way("one bucket, of 25 MB", bucket=25)}


def wrap(model: torch.nn.Module, way: Way) -> DistributedDataParallel:
    """DDP as this way has it. Where bucket_cap_mb is given, the first bucket is as large as the others."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=way.bucket)
    if way.compress:
        ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp


def sent() -> int | None:
    """Bytes that this node has sent; None where there is no eth0. (/sys/class/net is the machine's, not the node's.)"""
    found = [line.split(":")[1].split() for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line]
    return int(found[0][8]) if found else None


class Training:
    """One way's training. model has the parameters; each of steps() is an update of them."""

    def __init__(self, way, args, rank, ranks):
        sys.path.insert(0, str(ROOT / "03_ddp"))
        import workshop

        import main as chapter
        sys.path.remove(str(ROOT / "03_ddp"))
        self.way, self.args = way, args
        dtype = torch.float64 if args.precision == "fp64" else torch.float32
        batch = args.batch_size * way.batch
        torch.manual_seed(args.seed)
        flags = SimpleNamespace(**vars(args) | {"batch_size": batch, "global_batch_size": ranks * batch})
        self.data, _ = workshop.load_tensors(flags)
        self.std, self.mean = torch.std_mean(self.data.tensors[0][:256].to(dtype))
        self.sampler = DistributedSampler(self.data, ranks, rank, seed=args.seed, drop_last=True)
        self.batches = chapter.batches(self.data, self.sampler, batch, torch.device("cpu"), drop_last=True)
        self.model = chapter.build_model("cnn", self.data.tensors[0]).to(dtype)
        self.ddp = wrap(self.model, way)
        self.lr = args.lr * ranks * args.batch_size * way.images / 256
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9)
        self.going = self.steps()

    def steps(self) -> Iterator[float]:
        """Train on and on; the loss after each step, epoch by epoch as main.py does; a rest fills no step."""
        epoch, dtype = 0, self.std.dtype
        while True:
            self.sampler.set_epoch(epoch)
            for number, (images, labels) in enumerate(self.batches):
                added = number % self.way.accumulate
                if added == 0:
                    if number + self.way.accumulate > len(self.batches):
                        break
                    self.optimizer.zero_grad()
                last = added == self.way.accumulate - 1
                with nullcontext() if last else self.ddp.no_sync():
                    logits = self.ddp((images.to(dtype) - self.mean) / self.std)
                    loss = cross_entropy(logits, labels)
                    (loss / self.way.accumulate).backward()
                if last:
                    self.optimizer.step()
                    yield loss.item()
            epoch += 1

    def timed(self, steps: int) -> tuple[list[float], int | None]:
        """(seconds of each of so many further steps, bytes that this node sent for one), after a step that warms up."""
        next(self.going)
        before, times = sent(), [time.perf_counter()]
        for _ in range(steps):
            next(self.going)
            times.append(time.perf_counter())
        after = sent()
        bytes_each = None if before is None else (after - before) / steps
        return [end - start for start, end in zip(times, times[1:])], bytes_each


def trained(way: Way, args: SimpleNamespace, rank: int, ranks: int, steps: int) -> torch.Tensor:
    """All parameters, one after the other, after so many steps."""
    training = Training(way, args, rank, ranks)
    for _ in range(steps):
        next(training.going)
    return torch.nn.utils.parameters_to_vector(training.model.parameters()).detach()


def measure_ways(ways, steps, repeats, rank, ranks):
    """A record for each way and repeat."""
    trainings = {name: Training(WAYS[name], MAIN, rank, ranks) for name in ways}
    for training in trainings.values():
        for _ in range(WARM_UP):
            next(training.going)
    records = []
    for repeat in range(repeats):
        for name, training in trainings.items():
            times, sent_bytes = training.timed(steps)
            step, images = statistics.median(times), MAIN.batch_size * training.way.images
            parameters = sum(parameter.numel() for parameter in training.model.parameters())
            records.append({"program": "slow_link.py", "chapter": "03_ddp", "way": name, "repeat": repeat,
                            "ranks": ranks, "nodes": ranks, "device": "cpu", "dataset": MAIN.dataset, "model": "cnn",
                            "image_size": MAIN.image_size, "precision": MAIN.precision, "batch_size": images,
                            "global_batch_size": ranks * images, "parameters": parameters, "steps": len(times),
                            "gradient_bytes": parameters * training.std.dtype.itemsize, "step_seconds": step,
                            "times": times, "images_per_second": ranks * images / step, "sent_bytes": sent_bytes})
    return records


def measure_all_reduces(sizes, repeats, ranks, gather):
    """A record for each size and repeat: gloo's all-reduce, as DDP calls it; it takes as long as the slowest rank."""
    records = []
    for repeat in range(-1, repeats):  # the first warms up
        for size in sizes:
            tensor = torch.ones(size // 4)
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(tensor)
            seconds = max(gather(time.perf_counter() - started))
            if not torch.equal(tensor, torch.full_like(tensor, ranks)):
                raise ArithmeticError(f"{size} bytes: not the sum over {ranks} ranks")
            records.append({"algorithm": "gloo", "nodes": ranks, "ranks": ranks, "bytes": size, "repeat": repeat,
                            "seconds": seconds})
    return [record for record in records if record["repeat"] >= 0]


def main():
    from workshop import BACKENDS, Parser, refuse_unwritable, whole

    from ranks import find_ranks, gather
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ways", nargs="+", choices=WAYS, default=[], help="how gradients travel")
    add("--all-reduce", nargs="+", type=whole, default=[], metavar="BYTES", help="time gloo's all-reduce instead")
    add("--steps", type=whole, default=5, help="timed steps of each way and repeat (5)")
    add("--repeats", type=whole, default=3)
    add("--results", metavar="FILE", help="append the records, a JSON line each")
    args = parser.parse_args()
    rank, ranks, _ = find_ranks()
    refuse_unwritable(args.results)
    torch.set_num_threads(1)
    dist.init_process_group(BACKENDS["cpu"])
    if args.all_reduce:
        records = measure_all_reduces(args.all_reduce, args.repeats, ranks, gather)
    else:
        records = measure_ways(args.ways, args.steps, args.repeats, rank, ranks)
    if rank == 0 and args.results:
        with open(args.results, "a") as file:
            link = {"link": os.environ.get("LAB_LINK")}
            file.writelines(json.dumps(record | link) + "\n" for record in records)
    dist.barrier()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "03_ddp"))
    from ranks import run
    run(main)
