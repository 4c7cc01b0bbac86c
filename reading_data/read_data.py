"""Read batches of images in four ways (MPI-IO in two variants), and check every image.

    mpiexec -n 2 python read_data.py --way mpi-io --results FILE      # one JSON line

`python -m tools.measuring.reading`, in the top folder, measures all ways.

Image i belongs to rank i % ranks, and each rank shuffles its own images, because a rank with its
own file, or a preloaded part, has no others. So all ways deliver the same bytes to the same ranks.

A run reads the epoch twice: cold (page cache dropped) and warm (page cache filled). The times do
not include the check. The next run uses the same files. Linux only.
"""

import argparse
import json
import os
import sys
import time
import traceback
import zlib
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

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
def one_file_per_rank(world, path, order, buffer):
    indices = order[world.rank] // world.size
    with open(path, "rb") as file:
        yield lambda step: read_images(file, indices[step], buffer[step])


@contextmanager
def mpi_io(world, path, order, buffer, hints):
    """Read collectively, once per step: a file view contains only the rank's images.

    A file view is read in ascending order. The datatype in memory puts each image into its row.
    """
    from mpi4py import MPI
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
def readers(world, path, order, buffer):
    """Let the first rank of each node read the batches of the node's ranks, and scatter them."""
    node = split_by_node(world)
    members, batches = node.allgather(world.rank), np.empty((node.size, BATCH, SIZE), np.uint8)
    with open(path, "rb") as file:
        def read(step):
            if node.rank == 0:
                for member, batch in zip(members, batches):
                    read_images(file, order[member, step], batch)
            node.Scatter(batches, buffer[step])

        yield read


@contextmanager
def preloaded(world, path, order, buffer):
    """Read the rank's file once, from beginning to end, and pick the batches from memory."""
    images = np.fromfile(path, np.uint8).reshape(-1, SIZE)
    indices = order[world.rank] // world.size
    # mode="clip": the default, "raise", makes another copy
    yield lambda step: np.take(images, indices[step], 0, buffer[step], mode="clip")


WAYS = {"files": one_file_per_rank, "mpi-io": partial(mpi_io, hints=HINTS),
        "mpi-io-default": partial(mpi_io, hints={}), "readers": readers, "preloaded": preloaded}
OWN_FILE = ("files", "preloaded")


def split_by_node(world):
    from mpi4py import MPI
    return world.Split_type(MPI.COMM_TYPE_SHARED)


def parse_args(world):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = sys.exit  # prints one line, without the usage
    add = parser.add_argument
    add("--way", choices=WAYS, required=True)
    add("--folder", type=Path, default=Path("data"), help="folder for the images (data)")
    add("--images", type=int, default=8_192, help="number of images (8192)")
    add("--results", type=Path, metavar="FILE", help="append one JSON line with the measurements")
    args = parser.parse_args()
    step = BATCH * world.size
    if args.images < 1 or args.images % step:
        sys.exit(f"--images: use a multiple of {step}: {BATCH} per step and rank")
    if args.results and not os.access(args.results.parent, os.W_OK):
        sys.exit(f"cannot write {args.results}: name a file in a folder that you may write to")
    return args


def run_on_all_ranks(world, task, *args):
    """Return the task's result. If the task exits on any rank, rank 0 prints why, and all exit.

    Rank 0 exits with 2, the others with 0: else the launcher could end rank 0 before it prints.
    """
    result = message = None
    try:
        result = task(*args)
    except SystemExit as problem:
        message = problem.code
    messages = list(filter(None, world.allgather(message)))
    if messages and world.rank == 0:
        print(f"read_data.py: {messages[0]}", file=sys.stderr, flush=True)
    if messages:
        sys.exit(2 if world.rank == 0 else 0)
    return result


def write_file(path, images, is_writer):
    """Write the images if this rank is a writer and the file does not exist."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_writer and not path.exists():
            with open(path.with_suffix(".tmp"), "wb") as file:
                images.tofile(file)
                os.fsync(file.fileno())
            path.with_suffix(".tmp").rename(path)  # so a killed run leaves no truncated file
    except OSError as problem:
        sys.exit(f"cannot write the images into --folder {path.parent}: {problem.strerror}")


def drop_page_cache(path, expected_size):
    """Drop a file from the page cache. Exit if it does not have the expected size."""
    size = path.stat().st_size if path.exists() else 0
    if size != expected_size:
        sys.exit(f"{path} has {size} bytes instead of {expected_size}: remove it, or use a "
                 "--folder that all nodes share")
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # the kernel drops only pages that are on disk
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(world, way, path, order, buffer):
    """Read an epoch. Return its time and speed, and the bytes that all ranks read."""
    def count_bytes():
        return int(Path("/proc/self/io").read_text().split()[1])  # after "rchar:"

    buffer.fill(0)
    bytes_before = count_bytes()
    world.Barrier()
    start_time = time.perf_counter()
    with WAYS[way](world, path, order, buffer) as read:
        world.Barrier()
        ready_time = time.perf_counter()
        for step in range(len(buffer)):
            read(step)
        world.Barrier()
        end_time = time.perf_counter()
    return {"ready_seconds": ready_time - start_time,
            "images_per_second": order.size / (end_time - ready_time),
            "read_bytes": world.allreduce(count_bytes() - bytes_before)}


def check(world, order, images, buffer):
    """Return, on rank 0, a checksum of the epoch. Exit if an image is missing or misplaced."""
    checksums = world.gather([zlib.crc32(image) for image in buffer.reshape(-1, SIZE)])
    if world.rank > 0:
        return None
    checksums = np.array(checksums).reshape(order.shape)
    expected = np.array([zlib.crc32(image) for image in images])
    if not np.array_equal(np.sort(checksums, None), np.sort(expected)):
        sys.exit("an image is missing, duplicated or damaged: remove the files in --folder")
    if not np.array_equal(checksums, expected[order]):
        sys.exit("each image was read once, but some by the wrong rank or in the wrong order")
    return f"{zlib.crc32(checksums.swapaxes(0, 1).tobytes()):08x}"


def run(world, args):
    """Measure one way, cold and warm, and append the record to args.results."""
    own_file = args.way in OWN_FILE
    ranks = world.size
    generator = np.random.default_rng(0)
    images = generator.integers(256, size=(args.images, SIZE), dtype=np.uint8)
    order = generator.permuted(np.arange(args.images).reshape(-1, ranks).T, axis=1)
    order = order.reshape(ranks, -1, BATCH)
    file_images = images[world.rank::ranks] if own_file else images
    path = args.folder / (f"images-{world.rank}-of-{ranks}.bin" if own_file else "images.bin")
    run_on_all_ranks(world, write_file, path, file_images, own_file or world.rank == 0)
    run_on_all_ranks(world, drop_page_cache, path, file_images.nbytes)
    buffer = np.empty((*order.shape[1:], SIZE), np.uint8)
    nodes = world.allreduce(int(split_by_node(world).rank == 0))
    record = {"way": args.way, "ranks": ranks, "nodes": nodes, "images": args.images,
              "image_bytes": SIZE, "batch_size": BATCH}
    for cache in "cold", "warm":
        epoch = measure(world, args.way, path, order, buffer)
        record |= {f"{cache}_{name}": value for name, value in epoch.items()}
        record["checksum"] = run_on_all_ranks(world, check, world, order, images, buffer)
    if world.rank == 0:
        print(f"{args.way} on {ranks} rank(s): images/s: "
              f"cold {record['cold_images_per_second']:,.0f}, "
              f"warm {record['warm_images_per_second']:,.0f}; "
              f"each image once, checksum {record['checksum']}")
        if args.results:
            with open(args.results, "a") as file:
                file.write(json.dumps(record) + "\n")


def main():
    from mpi4py import MPI
    world = MPI.COMM_WORLD

    def abort_all_ranks(*exception):
        traceback.print_exception(*exception)
        time.sleep(1)  # let the launcher forward the traceback
        world.Abort(1)

    sys.excepthook = abort_all_ranks
    args = run_on_all_ranks(world, parse_args, world)
    if args:  # None after --help
        run(world, args)


if __name__ == "__main__":
    main()
