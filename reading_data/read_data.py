"""Read batches of images in four ways, MPI-IO in two, and check every image that arrives.

    mpiexec -n 2 python read_data.py --way mpi-io --results FILE      # one JSON line

`python -m tools.measuring.reading`, in the top folder, is the study of all ways.

Image i belongs to rank i % ranks, and each rank shuffles its own images. Ranks that read one file
could take any image in any epoch; those with a file of their own, or a preloaded part, cannot. This
order suits them all, so every way has to deliver the same bytes to the same ranks.

A run reads the epoch twice: cold (the kernel has been told to forget the file) and warm (it is in
the kernel's memory). The clock stops before the check. The files stay for the next run. For Linux.
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

SIZE, BATCH = 3 * 32 * 32, 64  # bytes of an image, images of a step on each rank
HINTS = {"romio_cb_read": "disable",
         "romio_ds_read": "disable"}  # read the images, not all that lies between them


def read_images(file, places, into):
    for place, image in zip(places.tolist(), into):
        os.preadv(file.fileno(), [image], SIZE * place)


# A way is a context in which read(step) puts this rank's images of the step into into[step].
# path: the rank's file; order: numbers of images (ranks, steps, BATCH);
# into: bytes (steps, BATCH, SIZE).

@contextmanager
def one_file_per_rank(world, path, order, into):
    places = order[world.rank] // world.size
    with open(path, "rb") as file:
        yield lambda step: read_images(file, places[step], into[step])


@contextmanager
def mpi_io(world, path, order, into, hints):
    """Read collectively, once per step: a view of the file shows a rank its images alone.

    A view runs forward through the file, so the images come in ascending order; the type of the
    memory puts each into its row of the batch.
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
        file.Read_all([into[step], 1, in_memory])
        in_file.Free()
        in_memory.Free()

    yield read
    file.Close()


@contextmanager
def readers(world, path, order, into):
    """Let the first rank of each node read the batches of its node's ranks and scatter them."""
    node = split_by_node(world)
    members, batches = node.allgather(world.rank), np.empty((node.size, BATCH, SIZE), np.uint8)
    with open(path, "rb") as file:
        def read(step):
            if node.rank == 0:
                for member, batch in zip(members, batches):
                    read_images(file, order[member, step], batch)
            node.Scatter(batches, into[step])

        yield read


@contextmanager
def preloaded(world, path, order, into):
    """Read the rank's file once, from beginning to end, and pick the batches from memory."""
    images, places = np.fromfile(path, np.uint8).reshape(-1, SIZE), order[world.rank] // world.size
    # mode="raise" would copy once more
    yield lambda step: np.take(images, places[step], 0, into[step], mode="clip")


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
    add("--folder", type=Path, default=Path("data"), help="for the images (data)")
    add("--images", type=int, default=8_192, help="how many (8192)")
    add("--results", type=Path, metavar="FILE", help="append one JSON line with what was measured")
    args = parser.parse_args()
    step = BATCH * world.size
    if args.images < 1 or args.images % step:
        sys.exit(f"--images: take a multiple of {step}, {BATCH} per step and rank")
    if args.results and not os.access(args.results.parent, os.W_OK):
        sys.exit(f"cannot write {args.results}: name a file in a folder that you may write to")
    return args


def together(world, task, *args):
    """Return what the task returns. If it exits on any rank, rank 0 prints why, and all end.

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


def write_file(path, images, here):
    """Write the images if this rank has to and there is no file yet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if here and not path.exists():
            with open(path.with_suffix(".tmp"), "wb") as file:
                images.tofile(file)
                os.fsync(file.fileno())
            path.with_suffix(".tmp").rename(path)  # a killed run leaves no half file
    except OSError as problem:
        sys.exit(f"cannot write the images into --folder {path.parent}: {problem.strerror}")


def forget(path, expected):
    """Have the kernel drop a file of the expected size from its memory."""
    size = path.stat().st_size if path.exists() else 0
    if size != expected:
        sys.exit(f"{path} has {size} bytes instead of {expected}: remove it, or take a --folder "
                 "that all nodes share")
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # the kernel drops only what is on the disk
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(world, way, path, order, into):
    """Read an epoch; return its times and the bytes that all ranks get from the kernel."""
    def count_bytes():
        return int(Path("/proc/self/io").read_text().split()[1])  # after "rchar:"

    into.fill(0)
    before = count_bytes()
    world.Barrier()
    started = time.perf_counter()
    with WAYS[way](world, path, order, into) as read:
        world.Barrier()
        ready = time.perf_counter()
        for step in range(len(into)):
            read(step)
        world.Barrier()
        done = time.perf_counter()
    return {"ready_seconds": ready - started, "images_per_second": order.size / (done - ready),
            "read_bytes": world.allreduce(count_bytes() - before)}


def check(world, order, images, into):
    """Return, on rank 0, a checksum of the epoch's global batches in turn.

    Exits there unless each image arrived once, whole, and where the order says.
    """
    sums = world.gather([zlib.crc32(image) for image in into.reshape(-1, SIZE)])
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
    own, ranks = args.way in OWN_FILE, world.size
    generator = np.random.default_rng(0)
    images = generator.integers(256, size=(args.images, SIZE), dtype=np.uint8)
    order = generator.permuted(np.arange(args.images).reshape(-1, ranks).T, axis=1)
    order = order.reshape(ranks, -1, BATCH)
    part = images[world.rank::ranks] if own else images
    path = args.folder / (f"images-{world.rank}-of-{ranks}.bin" if own else "images.bin")
    together(world, write_file, path, part, own or world.rank == 0)
    together(world, forget, path, part.nbytes)
    into = np.empty((*order.shape[1:], SIZE), np.uint8)
    nodes = world.allreduce(int(split_by_node(world).rank == 0))
    record = {"way": args.way, "ranks": ranks, "nodes": nodes, "images": args.images,
              "image_bytes": SIZE, "batch_size": BATCH}
    for cache in "cold", "warm":
        epoch = measure(world, args.way, path, order, into)
        record |= {f"{cache}_{name}": value for name, value in epoch.items()}
        record["checksum"] = together(world, check, world, order, images, into)
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
        time.sleep(1)  # the launcher passes on why
        world.Abort(1)

    sys.excepthook = end_all  # if one fails, all end
    args = together(world, parse_args, world)
    if args:
        run(world, args)


if __name__ == "__main__":
    main()
