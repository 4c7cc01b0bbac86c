"""Three all-reduces in plain sight: counted, checked, and timed beside those of gloo and MPI.

    mpiexec -n 2 python ring_allreduce.py                                     # a table, 4 kB to 64 MB
    mpiexec -n 3 python ring_allreduce.py --sizes 4000 --results ring.jsonl

An all-reduce leaves the sum over all ranks on every rank. Three functions below do so with nothing but messages from
one rank to another. They take a tensor with one axis, on the CPU, and change it in place; S is its size in bytes, N the
number of ranks.
"""

import argparse
import functools
import json
import os
import platform
import socket
import statistics
import sys
import time
import traceback
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from mpi4py import MPI

SIZES = [4096 * 4**k for k in range(8)]  # bytes: 4 kB to 64 MB
REPEATS, WARM_UP = 15, 2


class Wire:
    """Sends and receives tensors. Counts the bytes that this rank sends, and the steps, which wait for each other."""

    def __init__(self):
        self.bytes = self.steps = 0

    def step(self, sends, receives):
        """Send tensors to ranks and receive tensors from ranks, [(tensor, rank)] each, all at the same time."""
        requests = [dist.irecv(tensor, rank) for tensor, rank in receives]  # first: a sender waits for its receiver
        requests += [dist.isend(tensor, rank) for tensor, rank in sends]
        for request in requests:
            request.wait()
        self.bytes += sum(tensor.nbytes for tensor, _ in sends)
        self.steps += 1


@functools.lru_cache(maxsize=3)
def room(count, length, dtype):
    """Memory to receive so many tensors into, kept for the next call: fresh memory would cost time, too."""
    return torch.empty(count, length, dtype=dtype)


def everyone_to_everyone(tensor, wire):
    """Each rank sends its whole tensor to all others: one step, (N-1) S bytes from each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(ranks) if other != rank]
    parts = room(ranks, len(tensor), tensor.dtype)
    parts[rank] = tensor
    wire.step([(tensor, other) for other in others], [(parts[other], other) for other in others])
    torch.sum(parts, 0, out=tensor)  # on every rank in the same order: all round alike


def reduce_and_broadcast(tensor, wire):
    """Rank 0 receives all tensors, and sends their sum to all: two steps, (N-1) S bytes from rank 0, S from others."""
    others = range(1, dist.get_world_size())
    if dist.get_rank() > 0:
        wire.step([(tensor, 0)], [])
        wire.step([], [(tensor, 0)])
        return
    parts = room(len(others), len(tensor), tensor.dtype)
    wire.step([], list(zip(parts, others)))
    for part in parts:
        tensor += part
    wire.step([(tensor, other) for other in others], [])


def ring(tensor, wire):
    """Each rank sends to its right neighbour only: 2(N-1) steps of S/N bytes, so 2(N-1)/N S bytes from each rank.

    Where N does not divide the tensor, zeros are added until it does, and sent: S then counts up to N-1 zeros.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    padding = -len(tensor) % ranks
    chunks = (torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor).view(ranks, -1)
    right, left, (received,) = (rank + 1) % ranks, (rank - 1) % ranks, room(1, chunks.shape[1], tensor.dtype)
    for step in range(ranks - 1):  # reduce-scatter: in the end rank r has the whole sum of chunk r + 1
        wire.step([(chunks[(rank - step) % ranks], right)], [(received, left)])
        chunks[(rank - step - 1) % ranks] += received
    for step in range(ranks - 1):  # all-gather: the sums go round
        wire.step([(chunks[(rank - step + 1) % ranks], right)], [(chunks[(rank - step) % ranks], left)])
    if padding:
        tensor.copy_(chunks.view(-1)[:len(tensor)])


def gloo(tensor, wire):
    """PyTorch's own all-reduce; what it sends is not counted."""
    dist.all_reduce(tensor)


def mpi(tensor, wire):
    """MPI's own, in the tensor's memory; what it sends is not counted."""
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())


ALGORITHMS = (everyone_to_everyone, reduce_and_broadcast, ring, gloo, mpi)


def meet():
    """Join the ranks that mpiexec started, so that gloo can carry messages between them. Returns rank and ranks."""
    world = MPI.COMM_WORLD
    sys.excepthook = lambda *problem: (traceback.print_exception(*problem), time.sleep(1), world.Abort(1))  # all end
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks share the cores of their node
    one_node = world.Split_type(MPI.COMM_TYPE_SHARED).size == world.size
    port = socket.create_server(("", 0)).getsockname()[1]  # one that is free
    host, port = world.bcast(("127.0.0.1" if one_node else socket.gethostname(), port))
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=world.rank, world_size=world.size)
    return world.rank, world.size


def part():
    """Leave together: gloo's threads must neither miss a message nor outlive Python."""
    dist.barrier()
    dist.destroy_process_group()


def measure(size, repeats):
    """Run every algorithm on a float32 tensor of so many bytes, all in turn, and again. Returns their records.

    A run takes as long as its slowest rank. The numbers are whole, and below 2^24 summed over up to 16,000 ranks: a
    sum is exact in whatever order it is added. Raises ArithmeticError where one differs from that of gloo.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = torch.randint(1000, (size // 4,), generator=torch.Generator().manual_seed(rank)).float()
    tensor, total = numbers.clone(), numbers.clone()
    dist.all_reduce(total)
    seconds, wires = {algorithm: [] for algorithm in ALGORITHMS}, {}
    for _ in range(WARM_UP + repeats):
        for algorithm in ALGORITHMS:
            tensor.copy_(numbers)
            wires[algorithm] = Wire()
            dist.barrier()
            started = time.perf_counter()
            algorithm(tensor, wires[algorithm])
            seconds[algorithm].append(time.perf_counter() - started)
            if not torch.equal(tensor, total):
                raise ArithmeticError(f"{algorithm.__name__}: rank {rank} has not the sum that gloo has")
    records = []
    for algorithm in ALGORITHMS:
        times, sent = zip(*MPI.COMM_WORLD.allgather((seconds[algorithm][WARM_UP:], wires[algorithm].bytes)))
        slowest, counted = [max(run) for run in zip(*times)], algorithm not in (gloo, mpi)
        records.append({"algorithm": algorithm.__name__, "ranks": ranks, "bytes": size, "repeats": repeats,
                        "seconds": statistics.median(slowest), "least": min(slowest), "most": max(slowest),
                        "bytes_sent": sent if counted else None,
                        "steps": wires[algorithm].steps if counted else None})
    return records


def table_row(record):
    size, ranks, counted = record["bytes"], record["ranks"], record["bytes_sent"]
    steps, sent = (record["steps"], f"{max(counted):,}") if counted else ("", "")
    median, least, most = (f"{1000 * record[key]:.3f}" for key in ("seconds", "least", "most"))
    bus = 2 * (ranks - 1) / ranks * size / record["seconds"] / 1e9
    return f"{size:11,} {record['algorithm']:>20} {steps:>5} {sent:>11} {f'{median} ({least}..{most})':>30} {bus:9.2f}"


def parse_args():
    def whole(text):
        if not text.isdecimal() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error, add = sys.exit, parser.add_argument
    add("--sizes", type=whole, nargs="+", default=SIZES, metavar="BYTES",
        help="of the tensor: float32, so multiples of 4 (4096 to 67108864, each four times the one before)")
    add("--repeats", type=whole, default=REPEATS, help=f"of each measurement, after {WARM_UP} that warm up ({REPEATS})")
    add("--results", metavar="FILE", help="append one JSON line for each size and algorithm")
    args, ranks = parser.parse_args(), MPI.COMM_WORLD.size
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if ranks == 1:
        sys.exit("one rank has nobody to send to: mpiexec -n 2 python ring_allreduce.py (the mpiexec beside python)")
    for size in args.sizes:
        if size % 4:
            sys.exit(f"--sizes {size}: a float32 has 4 bytes, so a tensor has a multiple of 4")
        if ranks * (2 * ranks + 4) * size > memory:  # a rank has four tensors in measure() and ring(), and room's 2N
            sys.exit(f"--sizes {size}: does not fit {ranks} times into the {memory / 1e9:.0f} GB of this node")
    if args.results:
        try:
            open(args.results, "a").close()
        except OSError as problem:
            sys.exit(f"cannot write {args.results}: {problem.strerror}")
    return args


def main():
    world, args, end = MPI.COMM_WORLD, None, None
    try:
        args = world.rank == 0 and parse_args()
    except SystemExit as problem:
        end = problem
    args, end = world.bcast((args, end))  # the mistake that rank 0 finds ends all
    if end:
        raise end
    rank, ranks = meet()
    about = {"host": platform.node(), "cpus": os.cpu_count(), "torch": torch.__version__,
             "mpi": " ".join(MPI.Get_library_version().splitlines()[0].split()),
             "time": datetime.now(UTC).isoformat(timespec="seconds")}
    if rank == 0:
        print("{} ranks on {cpus} cores of {host}, torch {torch}, {mpi}".format(ranks, **about))
        if ranks > about["cpus"]:
            print("more ranks than cores: they wait for cores, too, and the times are not those of the algorithms")
        print(f"median (least..most) of {args.repeats} runs; a run takes as long as its slowest rank\n"
              "sent: by the rank that sends most; bus: 2(N-1)/N S / time, what each rank of a ring sends a second\n\n"
              f"{'S, bytes':>11} {'algorithm':>20} {'steps':>5} {'sent, bytes':>11} {'ms':>30} {'bus, GB/s':>9}")
    for size in args.sizes:
        for record in measure(size, args.repeats):
            if rank:
                continue
            print(table_row(record), flush=True)
            if args.results:
                with open(args.results, "a") as file:
                    file.write(json.dumps(record | about) + "\n")
    if rank == 0:
        print("\nall sums: equal to gloo's on every rank, bit for bit")
    part()


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        if end.code and MPI.COMM_WORLD.rank == 0:
            print(f"ring_allreduce.py: {end}", file=sys.stderr)
        sys.exit(2 if end.code else 0)
