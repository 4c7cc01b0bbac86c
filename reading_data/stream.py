"""Train on a stream: files that can only be read from the beginning, each sample once per epoch.

    python stream.py                                 # one rank
    mpiexec -n 2 python stream.py --workers 2        # two workers read for each rank
    mpiexec -n 2 python stream.py --max-steps 30     # stops in the second epoch, with a checkpoint
    python stream.py --resume                        # reads the rest of it, on any number of ranks

For your own files copy Stream and take(), and change read() and decode().
"""

import gzip
import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from workshop.data import load_digits
from workshop.devices import gather
from workshop.ending import run
from workshop.flags import Parser
from workshop.ranks import find_ranks

FOLDER, CHECKPOINT = Path("data/stream"), Path("data/stream.pt")


def make_files():
    """Write digits as lines, index, label and pixels, into 7 compressed files of unequal length."""
    part = FOLDER.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    digits, _ = load_digits()
    pixels = digits.images.reshape(-1, 64)
    rows = np.column_stack([np.arange(len(digits)), digits.labels, pixels])
    for number, samples in enumerate(np.split(rows, [40, 500, 501, 700, 950, 1300])):
        np.savetxt(part / f"{number}.csv.gz", samples, "%d", ",")
    part.rename(FOLDER)  # so that incomplete files never have this name


def read(path):
    """Return the samples of one file, not yet decoded. They have to fit into a worker's memory."""
    with gzip.open(path, "rt") as file:
        return file.readlines()


def decode(line):
    index, label, *pixels = map(int, line.split(","))
    return index, label, torch.tensor(pixels) / 16


def take(spans, start, stop):
    """Return the samples from `start` to `stop` of spans (file, begin, end), as spans."""
    taken = []
    for file, begin, end in spans:
        first, last = begin + max(start, 0), min(begin + stop, end)
        if first < last:
            taken.append((file, first, last))
        start, stop = start - (end - begin), stop - (end - begin)
    return taken


class Stream(IterableDataset):
    """The samples of all files in a random order, cut into one part per worker of each rank.

    lengths: the number of samples in each file. rest: {epoch: spans} of an interrupted epoch.
    """

    def __init__(self, paths, lengths, batch_size, rank, world_size, rest):
        self.paths, self.lengths, self.rest = paths, lengths, rest
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.epoch = torch.tensor(0).share_memory_()  # so that persistent workers see set_epoch()

    def set_epoch(self, epoch):
        self.epoch.fill_(epoch)

    def spans(self):
        """Return what the epoch reads: the files in a random order, the same on all ranks."""
        epoch = self.epoch.item()
        if epoch in self.rest:
            return self.rest[epoch]
        files = np.random.default_rng(epoch).permutation(len(self.paths)).tolist()
        return [(file, 0, self.lengths[file]) for file in files]

    def steps(self):
        """Return the steps of this epoch, as many on each rank; what is left over is dropped."""
        samples = sum(end - begin for _, begin, end in self.spans())
        return samples // (self.batch_size * self.world_size)

    def part(self, rank, worker, workers, done=0):
        """Return what a worker still reads after `done` steps. A rank's workers take turns."""
        steps = self.steps()  # worker 0 of 2 reads for steps 0, 2, 4, ...
        start = rank * steps + sum(len(range(other, steps, workers)) for other in range(worker))
        stop = start + len(range(worker, steps, workers))
        start += len(range(worker, done, workers))
        return take(self.spans(), start * self.batch_size, stop * self.batch_size)

    def left(self, done, workers):
        """Return what the epoch has left after `done` steps, for any number of ranks."""
        spans = []
        for rank in range(self.world_size):
            for turn in range(done, done + workers):
                spans += self.part(rank, turn % workers, workers, done)
        dropped = take(self.spans(), self.steps() * self.batch_size * self.world_size, math.inf)
        return spans + dropped

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for file, begin, end in self.part(self.rank, worker, workers):
            samples = read(self.paths[file])
            if len(samples) != self.lengths[file]:
                raise ValueError(f"{self.paths[file]} does not have {self.lengths[file]} samples")
            order = np.random.default_rng((self.epoch.item(), file)).permutation(len(samples))
            for index in order[begin:end]:
                yield decode(samples[index])


def main():
    rank, world_size, _ = find_ranks()
    parser = Parser(__doc__)
    parser.add_argument("--workers", type=int, default=1, help="DataLoader workers per rank (1)")
    parser.add_argument("--max-steps", type=int, help="save a checkpoint after these steps, end")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    args = parser.parse_args()
    if 64 % world_size or (args.resume and not CHECKPOINT.exists()):
        raise SystemExit(f"the ranks have to divide 64, and --resume needs {CHECKPOINT}")
    dist.init_process_group("gloo")  # CPUs are enough here; chapter 3 trains on GPUs
    if rank == 0 and not FOLDER.exists():
        make_files()
    dist.barrier()  # the others wait for the files
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    state = {"model": model.state_dict(), "epoch": 0, "rest": {}}  # plain SGD has no state
    if args.resume:
        state = torch.load(CHECKPOINT)
        model.load_state_dict(state["model"])
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    paths = sorted(FOLDER.glob("*.gz"))
    lengths = [len(read(path)) for path in paths]  # large files: count once, and keep the numbers
    batch_size = 64 // world_size  # per rank
    stream = Stream(paths, lengths, batch_size, rank, world_size, state["rest"])
    loader = DataLoader(stream, batch_size, num_workers=args.workers,
                        persistent_workers=args.workers > 0,  # spawned workers start slowly
                        multiprocessing_context="spawn" if args.workers else None)
    step = 0
    for epoch in range(state["epoch"], 3):
        stream.set_epoch(epoch)
        indices, losses = [], []
        for batch_indices, labels, images in loader:
            loss = nn.functional.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            indices += batch_indices.tolist()
            losses.append(loss.item())
            step += 1
            if step == args.max_steps:
                break
        everything = np.concatenate(gather(indices))
        if rank == 0:
            print(f"epoch {epoch + 1}: {len(losses)} of {stream.steps()} steps, {everything.size} "
                  f"samples, {np.unique(everything).size} different, "
                  f"loss {sum(losses) / max(len(losses), 1):.4f}", flush=True)
        if step == args.max_steps:
            if rank == 0:  # it knows what all ranks have read
                rest = {epoch: stream.left(len(losses), max(args.workers, 1))}
                torch.save({"model": model.state_dict(), "epoch": epoch, "rest": rest}, CHECKPOINT)
            break


if __name__ == "__main__":
    run(main)
