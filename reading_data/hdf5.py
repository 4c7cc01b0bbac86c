"""Read images from one HDF5 file with PyTorch's DataLoader, on any number of ranks.

    python hdf5.py --workers 0                  # the training process also reads
    mpiexec -n 2 python hdf5.py --workers 1     # one worker per rank reads ahead

The first run creates the file. Each run prints images/s of the second epoch.
"""

import time
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from workshop.devices import gather
from workshop.ending import run
from workshop.flags import Parser
from workshop.ranks import find_ranks

PATH, SHAPE = Path("data/images.h5"), (4096, 3, 64, 64)  # images, channels, height, width
BATCH = 64  # images per step and rank


class Images(Dataset):
    """The images of a file, as bytes, and their labels."""

    def __init__(self, path: Path):
        self.path, self.file = path, None
        with h5py.File(path) as file:
            self.length = len(file["labels"])

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.file is None:  # each worker opens it: an open HDF5 file cannot be pickled
            self.file = h5py.File(self.path)
        return self.file["images"][index], self.file["labels"][index]


def make_file():
    """Write random images, one chunk each, so that each can be read alone. Image i has label i."""
    PATH.parent.mkdir(exist_ok=True)
    part = PATH.with_suffix(".part")
    images = np.random.default_rng(0).integers(256, size=SHAPE, dtype=np.uint8)
    with h5py.File(part, "w") as file:
        file.create_dataset("images", data=images, chunks=(1, *SHAPE[1:]))
        file["labels"] = np.arange(len(images))
    part.rename(PATH)  # so that an incomplete file never has this name


def main():
    rank, world_size, _ = find_ranks()
    parser = Parser(__doc__)
    parser.add_argument("--workers", type=int, default=1, help="DataLoader workers per rank (1)")
    args = parser.parse_args()
    dist.init_process_group("gloo")  # it only waits for the other ranks here
    if rank == 0 and not PATH.exists():
        make_file()
    dist.barrier()  # the others wait for the file

    dataset = Images(PATH)
    sampler = DistributedSampler(dataset, world_size, rank, drop_last=True)
    loader = DataLoader(
        dataset, BATCH, sampler=sampler, num_workers=args.workers,
        pin_memory=torch.accelerator.is_available(),  # then copies to a GPU do not block the CPU
        persistent_workers=args.workers > 0,  # else every epoch starts them again
        multiprocessing_context="spawn" if args.workers else None)  # with MPI a fork may hang
    for epoch in range(2):
        sampler.set_epoch(epoch)
        dist.barrier()
        start_time, epoch_labels = time.perf_counter(), []
        for images, labels in loader:  # noqa: B007  a training would use the images
            epoch_labels += labels.tolist()
        seconds = max(gather(time.perf_counter() - start_time))
    count = len(set().union(*gather(epoch_labels)))
    assert count == len(sampler) * world_size, "an image is missing or was read twice"
    if rank == 0:
        print(f"{world_size} ranks, {args.workers} workers each: {count / seconds:,.0f} images/s")


if __name__ == "__main__":
    run(main)
