"""Train on a stream: files that can only be read from the beginning, each sample once per epoch.

    python stream.py                                 # one rank
    mpiexec -n 2 python stream.py --workers 2        # two workers read for each rank
    mpiexec -n 2 python stream.py --max-steps 30     # stops in the second epoch, with a checkpoint
    python stream.py --resume                        # reads the rest of it, on any number of ranks

For your own files copy Stream and take(), and change read() and decode().
"""

import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from workshop.data import load_digits
from workshop.ending import run
from workshop.flags import Parser
from workshop.ranks import find_ranks

FOLDER, CHECKPOINT = Path("data/stream"), Path("data/stream.pt")
GLOBAL_BATCH = 64


def make_files():
    """Write digits as lines, label and pixels, into 7 compressed files of unequal length."""
    part = FOLDER.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    digits, _ = load_digits()
    rows = np.column_stack([digits.labels, digits.images.reshape(-1, 64)])
    for number, samples in enumerate(np.split(rows, [40, 500, 501, 700, 950, 1300])):
        np.savetxt(part / f"{number}.csv.gz", samples, "%d", ",")
    part.rename(FOLDER)  # so that incomplete files never have this name


def read(path):
    """Return the samples of one file, not yet decoded. They have to fit into a worker's memory."""
    return np.loadtxt(path, np.uint8, delimiter=",", ndmin=2)


def decode(row):
    return int(row[0]), torch.tensor(row[1:]) / 16


def take(spans, start, stop):
    """Return the samples from `start` to `stop` of spans (file, begin, end), as spans."""
    part = []
    for file, begin, end in spans:
        first, last = begin + max(start, 0), min(begin + stop, end)
        if first < last:
            part.append((file, first, last))
        start, stop = start - (end - begin), stop - (end - begin)
    return part


class Stream(IterableDataset):
    """The samples of some spans, cut into one part per worker of each rank.

    files: (path, number of samples) of each. workers: of each rank, at least one.
    """

    def __init__(self, files, spans, epoch, batch_size, rank, world_size, workers):
        self.files, self.spans, self.epoch, self.batch_size = files, spans, epoch, batch_size
        self.rank, self.world_size, self.workers = rank, world_size, workers
        samples = sum(end - begin for _, begin, end in spans)
        self.batches = samples // (batch_size * world_size * workers)  # of each worker
        self.steps = self.batches * workers  # of each rank; what is left over is dropped

    def part(self, worker, done=0):
        """Return what a worker reads after `done` batches. worker: a number over all ranks."""
        start, stop = worker * self.batches + done, (worker + 1) * self.batches
        return take(self.spans, start * self.batch_size, stop * self.batch_size)

    def left(self, steps):
        """Return what the epoch has left after these steps, for any number of ranks."""
        spans = []
        for worker in range(self.world_size * self.workers):  # a rank's workers take turns
            spans += self.part(worker, len(range(worker % self.workers, steps, self.workers)))
        return spans + take(self.spans, self.world_size * self.steps * self.batch_size, math.inf)

    def __iter__(self):
        info = get_worker_info()
        for file, begin, end in self.part(self.rank * self.workers + (info.id if info else 0)):
            path, length = self.files[file]
            samples = read(path)
            if len(samples) != length:
                raise ValueError(f"{path} does not have {length} samples")
            order = np.random.default_rng((self.epoch, file)).permutation(length)
            for index in order[begin:end]:
                yield decode(samples[index])


def main():
    rank, world_size, _ = find_ranks()
    parser = Parser(__doc__)
    parser.add_argument("--workers", type=int, default=1, help="DataLoader workers per rank (1)")
    parser.add_argument("--max-steps", type=int, help="save a checkpoint after these steps, end")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    args = parser.parse_args()
    if GLOBAL_BATCH % world_size or (args.resume and not CHECKPOINT.exists()):
        raise SystemExit(f"the ranks have to divide 64, and --resume needs {CHECKPOINT}")
    dist.init_process_group("gloo")  # CPUs are enough here; chapter 3 trains on GPUs
    if rank == 0 and not FOLDER.exists():
        make_files()
    dist.barrier()  # the others wait for the files
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    step, first_epoch, spans = 0, 0, None
    if args.resume:
        state = torch.load(CHECKPOINT)
        model.load_state_dict(state["model"])  # plain SGD has no state
        first_epoch, spans = state["epoch"], state["left"]
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    paths = sorted(FOLDER.glob("*.gz"))
    files = [(path, len(read(path))) for path in paths]  # large files: count once, keep the numbers
    batch_size = GLOBAL_BATCH // world_size  # per rank
    for epoch in range(first_epoch, 3):
        if spans is None:  # all files in a random order, the same on all ranks
            order = np.random.default_rng(epoch).permutation(len(files)).tolist()
            spans = [(file, 0, files[file][1]) for file in order]
        stream = Stream(files, spans, epoch, batch_size, rank, world_size, max(args.workers, 1))
        loader = DataLoader(stream, batch_size, num_workers=args.workers,
                            multiprocessing_context="spawn" if args.workers else None)
        losses = []
        for labels, images in loader:
            loss = nn.functional.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step == args.max_steps:
                break
        if rank == 0:
            print(f"epoch {epoch + 1}: {len(losses)} of {stream.steps} steps, "
                  f"loss {sum(losses) / max(len(losses), 1):.4f}", flush=True)
        spans = None
        if step == args.max_steps:
            if rank == 0:  # it knows what all ranks have read
                temporary = CHECKPOINT.with_suffix(".tmp")
                torch.save({"model": model.state_dict(), "epoch": epoch,
                            "left": stream.left(len(losses))}, temporary)
                temporary.replace(CHECKPOINT)  # never a half-written file
            break


if __name__ == "__main__":
    run(main)
