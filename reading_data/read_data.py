"""Read batches of images in four ways (MPI-IO in two variants), and check every image.

    mpiexec -n 2 python read_data.py --way mpi-io --results FILE      # one JSON line

`python -m tools.measuring.reading`, in the top folder, measures all ways.

Image i belongs to rank i % ranks, and each rank shuffles its own images. Ranks that read one file
could use any image in any epoch; those with their own file, or a preloaded part, cannot. This order
suits them all, so every way has to deliver the same bytes to the same ranks.

A run reads the epoch twice: cold (page cache dropped) and warm (page cache filled). The clock
stops before the check. The files stay for the next run. Linux only.
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


# A way is a context in which read(step) reads this rank's images of the step into buffer[step].
# path: the rank's file; order: image indices (ranks, steps, BATCH);
# buffer: bytes (steps, BATCH, SIZE).

@contextmanager
def one_file_per_rank(world, path, order, buffer):
    indices = order[world.rank] // world.size
    with open(path, "rb") as file:
        yield lambda step: read_images(file, indices[step], buffer[step])


@contextmanager
def mpi_io(world, path, order, buffer, hints):
    """Read collectively, once per step: a file view contains only the rank's images.

    A view moves forward through the file, so the images come in ascending order; the memory
    datatype puts each into its row of the batch.
    """
    from mpi4py import MPI
    image = MPI.BYTE.Create_contiguous(SIZE).Commit()
    file = MPI.File.Open(world, str(path), MPI.MODE_RDONLY, MPI.Info.Create(hints))

    def read(step):
        rows = np.argsort(order[world.rank, step]).astype(np.int32)
        numbers = order[world.rank, step, rows].astype(np.int32)
        in_file = image.Create_indexed_block(1, numbers).Commit()
        in_memory = image.Create_indexed_block(1, rows).Commit()
        file.Set_view(0, image, in_file)
        file.Read_all([buffer[step], 1, in_memory])
        in_file.Free()
        in_memory.Free()

    yield read
    file.Close()


@contextmanager
def readers(world, path, order, buffer):
    """Read and scatter the batches of a node's ranks on the node's first rank."""
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
    # mode="raise" would make another copy
    yield lambda step: np.take(images, indices[step], 0, buffer[step], mode="clip")


WAYS = {"files": one_file_per_rank, "mpi-io": partial(mpi_io, hints=HINTS),
        "mpi-io-default": partial(mpi_io, hints={}), "readers": readers, "preloaded": preloaded}
OWN_FILE = ("files", "preloaded")


def split_by_node(world):
    from mpi4py import MPI
    return world.Split_type(MPI.COMM_TYPE_SHARED)


def parse_args(world):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = sys.exit  # one line, without the usage
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

    Rank 0's exit code is 2. The others' is 0: else the launcher could end rank 0 before it prints.
    """
    result = line = None
    try:
        result = task(*args)
    except SystemExit as end:
        line = end.code
    line = next(filter(None, world.allgather(line)), None)
    if line and world.rank == 0:
        print(f"read_data.py: {line}", file=sys.stderr, flush=True)
    if line:
        sys.exit(2 if world.rank == 0 else 0)
    return result


def write_file(path, images, is_writer):
    """Write the images if this rank is a writer and there is no file yet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_writer and not path.exists():
            with open(path.with_suffix(".tmp"), "wb") as file:
                images.tofile(file)
                os.fsync(file.fileno())
            path.with_suffix(".tmp").rename(path)  # a killed run leaves no truncated file
    except OSError as problem:
        sys.exit(f"cannot write the images into --folder {path.parent}: {problem.strerror}")


def drop_page_cache(path, expected):
    """Drop a file of the expected size from the page cache."""
    size = path.stat().st_size if path.exists() else 0
    if size != expected:
        sys.exit(f"{path} has {size} bytes instead of {expected}: remove it, or use a --folder "
                 "that all nodes share")
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # the kernel drops only pages that are on disk
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(world, way, path, order, buffer):
    """Read an epoch; return its times and the bytes that all ranks read."""
    def count_bytes():
        return int(Path("/proc/self/io").read_text().split()[1])  # after "rchar:"

    buffer.fill(0)
    before = count_bytes()
    world.Barrier()
    started = time.perf_counter()
    with WAYS[way](world, path, order, buffer) as read:
        world.Barrier()
        ready = time.perf_counter()
        for step in range(len(buffer)):
            read(step)
        world.Barrier()
        done = time.perf_counter()
    return {"ready_seconds": ready - started, "images_per_second": order.size / (done - ready),
            "read_bytes": world.allreduce(count_bytes() - before)}


def check(world, order, images, buffer):
    """Return on rank 0 a checksum of the epoch's global batches, in order.

    Exits there unless each image arrived once, intact, and in its place.
    """
    sums = world.gather([zlib.crc32(image) for image in buffer.reshape(-1, SIZE)])
    if world.rank > 0:
        return None
    arrived = np.array(sums).reshape(order.shape)
    expected = np.array([zlib.crc32(image) for image in images])
    if not np.array_equal(np.sort(arrived, None), np.sort(expected)):
        sys.exit("what arrived is not each image once: remove the files in --folder")
    if not np.array_equal(arrived, expected[order]):
        sys.exit("each image arrived once, but not where the order says")
    return f"{zlib.crc32(arrived.swapaxes(0, 1).tobytes()):08x}"


def run(world, args):
    """Measure one way, cold and warm, and append the record to args.results."""
    own_file = args.way in OWN_FILE
    ranks = world.size
    generator = np.random.default_rng(0)
    images = generator.integers(256, size=(args.images, SIZE), dtype=np.uint8)
    order = generator.permuted(np.arange(args.images).reshape(-1, ranks).T, axis=1)
    order = order.reshape(ranks, -1, BATCH)
    part = images[world.rank::ranks] if own_file else images
    path = args.folder / (f"images-{world.rank}-of-{ranks}.bin" if own_file else "images.bin")
    run_on_all_ranks(world, write_file, path, part, own_file or world.rank == 0)
    run_on_all_ranks(world, drop_page_cache, path, part.nbytes)
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

    def end_all(*problem):
        traceback.print_exception(*problem)
        time.sleep(1)  # let the launcher forward the traceback
        world.Abort(1)

    sys.excepthook = end_all  # if one rank fails, all end
    args = run_on_all_ranks(world, parse_args, world)
    if args:
        run(world, args)


if __name__ == "__main__":
    main()
