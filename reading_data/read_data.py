"""Read batches of images in four ways (MPI-IO in two variants), and check every image.

    mpiexec -n 2 python read_data.py --folder FOLDER     # on the disk to be measured

Image i belongs to rank i % ranks, and each rank shuffles its own images, because a rank with its
own file, or a preloaded part, has no others. So all ways deliver the same bytes to the same ranks.
Each way reads the epoch twice: cold (page cache dropped) and warm (page cache filled). Linux only.
"""

import os
import sys
import time
import traceback
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

from workshop.flags import Parser

world = MPI.COMM_WORLD
SIZE, BATCH = 3 * 32 * 32, 64  # bytes per image, images per step and rank
HINTS = {"romio_cb_read": "disable",
         "romio_ds_read": "disable"}  # read only the images, not the bytes between them


def read_images(file, indices, buffer):
    for index, image in zip(indices.tolist(), buffer):
        os.preadv(file.fileno(), [image], SIZE * index)


# Each way is a context manager that yields read(step), which fills buffer[step] of this rank.
# path: the rank's own file, or that of all ranks; order: image indices (ranks, steps, BATCH);
# buffer: (steps, BATCH, SIZE).

@contextmanager
def one_file_per_rank(path, order, buffer):
    indices = order[world.rank] // world.size
    with open(path, "rb") as file:
        yield lambda step: read_images(file, indices[step], buffer[step])


@contextmanager
def mpi_io(path, order, buffer, hints):
    """Read collectively, once per step: a file view contains only the rank's images.

    A file view is read in ascending order. The datatype in memory puts each image into its row.
    """
    image = MPI.BYTE.Create_contiguous(SIZE).Commit()
    file = MPI.File.Open(world, str(path), MPI.MODE_RDONLY, MPI.Info.Create(hints))

    def read(step):
        rows = np.argsort(order[world.rank, step]).astype(np.int32)
        indices = order[world.rank, step, rows].astype(np.int32)
        in_file = image.Create_indexed_block(1, indices).Commit()
        in_memory = image.Create_indexed_block(1, rows).Commit()
        file.Set_view(0, image, in_file)
        file.Read_all([buffer[step], 1, in_memory])
        in_file.Free()
        in_memory.Free()

    yield read
    file.Close()


@contextmanager
def readers(path, order, buffer):
    """Let the first rank of each node read the batches of the node's ranks, and scatter them."""
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    members, batches = node.allgather(world.rank), np.empty((node.size, BATCH, SIZE), np.uint8)
    with open(path, "rb") as file:
        def read(step):
            if node.rank == 0:
                for member, batch in zip(members, batches):
                    read_images(file, order[member, step], batch)
            node.Scatter(batches, buffer[step])

        yield read


@contextmanager
def preloaded(path, order, buffer):
    """Read the rank's file once, from beginning to end, and pick the batches from memory."""
    images = np.fromfile(path, np.uint8).reshape(-1, SIZE)
    indices = order[world.rank] // world.size
    # mode="clip": the default, "raise", makes another copy
    yield lambda step: np.take(images, indices[step], 0, buffer[step], mode="clip")


WAYS = {"files": one_file_per_rank, "mpi-io": partial(mpi_io, hints=HINTS),
        "mpi-io-default": partial(mpi_io, hints={}), "readers": readers, "preloaded": preloaded}


def open_cold(way, folder, images):
    """Write the images as this way reads them; return the path, dropped from the page cache."""
    path = folder / "read_data.bin"
    if way in ("files", "preloaded"):
        path = folder / f"read_data-{world.rank}-of-{world.size}.bin"
        images[world.rank::world.size].tofile(path)
    elif world.rank == 0:
        images.tofile(path)
    world.Barrier()
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # the kernel drops only pages that are on disk
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def measure(way, path, order, buffer):
    """Open the file and read an epoch. Return the images/s and the bytes of all ranks."""
    def count_bytes():
        return int(Path("/proc/self/io").read_text().split()[1])  # after "rchar:"

    buffer.fill(0)
    bytes_before = count_bytes()
    world.Barrier()
    start_time = time.perf_counter()
    with WAYS[way](path, order, buffer) as read:
        for step in range(len(buffer)):
            read(step)
        world.Barrier()
        seconds = time.perf_counter() - start_time
    return order.size / seconds, world.allreduce(count_bytes() - bytes_before)


def abort(*exception):
    """End all ranks: an exception on one would let the others wait."""
    traceback.print_exception(*exception)
    time.sleep(1)  # let the launcher forward the text
    world.Abort(1)


def main():
    sys.excepthook = abort
    parser = Parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("data"), help="of the images (data)")
    parser.add_argument("--images", type=int, default=8_192, help="64 * ranks * steps (8192)")
    args = parser.parse_args()
    if args.images < 1 or args.images % (BATCH * world.size):
        parser.error(f"--images has to be a multiple of {BATCH * world.size}")

    generator = np.random.default_rng(0)
    images = generator.integers(256, size=(args.images, SIZE), dtype=np.uint8)
    order = generator.permuted(np.arange(args.images).reshape(-1, world.size).T, axis=1)
    order = order.reshape(world.size, -1, BATCH)
    args.folder.mkdir(parents=True, exist_ok=True)
    buffer = np.empty((*order.shape[1:], SIZE), np.uint8)
    if world.rank == 0:
        print(f"{args.images:,} images, {images.nbytes:,} bytes, on {world.size} ranks\n\n"
              f"{'':16}{'cold, images/s':>16}{'warm, images/s':>16}{'bytes read':>16}")
    for way in WAYS:
        path = open_cold(way, args.folder, images)
        speeds = []
        for _ in "cold", "warm":
            speed, bytes_read = measure(way, path, order, buffer)
            speeds.append(speed)
            if not np.array_equal(buffer, images[order[world.rank]]):
                raise ValueError(f"{way}: an image is missing, duplicated or misplaced")
        if world.rank == 0:
            print(f"{way:16}{speeds[0]:16,.0f}{speeds[1]:16,.0f}{bytes_read:16,}", flush=True)
    if world.rank == 0:
        print("\neach way delivered each image once")


if __name__ == "__main__":
    main()
