"""Count the bytes of three all-reduces, and compare their times with gloo's and MPI's.

    mpiexec -n 4 python ring_allreduce.py --sizes 4096 1048576 16777216    # without: 4 kB to 64 MB
    torchrun --nproc-per-node 4 ring_allreduce.py                          # without MPI's

An all-reduce gives every rank the sum over all ranks. The first three functions use only messages
from one rank to another, on a one-dimensional CPU tensor of S bytes, among N ranks.
"""

import json
import statistics
import time

import torch
import torch.distributed as dist

from workshop.devices import gather
from workshop.ending import run
from workshop.flags import Parser, refuse_unwritable
from workshop.ranks import find_launcher, find_ranks

MPI = None
if find_launcher()[0] not in (None, "torchrun"):  # its ranks need no MPI
    from mpi4py import MPI

step_bytes = []  # what this rank has sent, in each step


def exchange(sends, receives):
    """Send and receive at the same time, as one step. Both arguments list (tensor, rank)."""
    requests = [dist.irecv(tensor, rank) for tensor, rank in receives]
    requests += [dist.isend(tensor, rank) for tensor, rank in sends]
    for request in requests:
        request.wait()
    step_bytes.append(sum(tensor.nbytes for tensor, _ in sends))


def everyone_to_everyone(tensor):
    """Send each rank's whole tensor to all others: one step, (N-1) S bytes from each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(world_size) if other != rank]
    parts = torch.empty(world_size, len(tensor))
    parts[rank] = tensor
    exchange([(tensor, other) for other in others], [(parts[other], other) for other in others])
    torch.sum(parts, 0, out=tensor)  # the same order on every rank, so the same rounding


def reduce_and_broadcast(tensor):
    """Send all tensors to rank 0, and from there their sum to all ranks.

    Two steps: (N-1) S bytes from rank 0, and S from each other rank.
    """
    others = range(1, dist.get_world_size())
    if dist.get_rank() > 0:
        exchange([(tensor, 0)], [])
        exchange([], [(tensor, 0)])
    else:
        parts = [torch.empty_like(tensor) for _ in others]
        exchange([], list(zip(parts, others)))
        for part in parts:
            tensor += part
        exchange([(tensor, other) for other in others], [])


def ring(tensor):
    """Send chunks around a ring: each rank sends only to its right neighbour.

    2(N-1) steps of S/N bytes, so 2(N-1)/N S bytes from each rank. If N does not divide the tensor,
    some chunks are longer by one number.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = tensor.tensor_split(world_size)  # parts of the tensor, not copies
    buffer = torch.empty_like(chunks[0])
    for step in range(world_size - 1):  # reduce-scatter: then rank r has the sum of chunk r + 1
        chunk = chunks[(rank - step - 1) % world_size]
        received = buffer[:len(chunk)]
        exchange([(chunks[(rank - step) % world_size], right)], [(received, left)])
        chunk += received
    for step in range(world_size - 1):  # all-gather: all ranks get all sums
        exchange([(chunks[(rank - step + 1) % world_size], right)],
                 [(chunks[(rank - step) % world_size], left)])


def gloo(tensor):
    dist.all_reduce(tensor)


def mpi(tensor):
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())


def measure(algorithm, numbers, repeats):
    """Return the record of an all-reduce. Raises ArithmeticError if its sum is not gloo's."""
    total, seconds = numbers.clone(), []
    dist.all_reduce(total)
    for _ in range(2 + repeats):  # the first two are not timed
        tensor = numbers.clone()
        step_bytes.clear()
        dist.barrier()
        start_time = time.perf_counter()
        algorithm(tensor)
        seconds.append(time.perf_counter() - start_time)
        if not torch.equal(tensor, total):
            raise ArithmeticError(f"{algorithm.__name__}: wrong sum on rank {dist.get_rank()}")
    slowest = [max(run) for run in zip(*gather(seconds[2:]))]  # each run's slowest rank
    return {"algorithm": algorithm.__name__, "ranks": dist.get_world_size(),
            "bytes": numbers.nbytes, "repeats": repeats, "seconds": statistics.median(slowest),
            "least": min(slowest), "most": max(slowest), "steps": len(step_bytes) or None,
            "bytes_sent": gather(sum(step_bytes)) if step_bytes else None}


def main():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[4**power for power in range(6, 14)],
        metavar="BYTES", help="sizes of the float32 tensor (4096 to 67108864, in steps of 4x)")
    add("--repeats", type=int, default=15, help="timed runs of each algorithm (15)")
    add("--results", metavar="FILE", help="append one JSON line per size and algorithm")
    args = parser.parse_args()
    if min(args.repeats, *args.sizes) < 1 or any(size % 4 for size in args.sizes):
        parser.error("--sizes: use multiples of 4, the bytes of a float32; --repeats: 1 or more")
    refuse_unwritable(args.results)
    rank, world_size, _ = find_ranks()
    if world_size == 1:
        parser.error("start two or more ranks: mpiexec -n 2 python ring_allreduce.py")
    torch.set_num_threads(1)  # the ranks share the cores of their node
    dist.init_process_group("gloo")
    algorithms = [everyone_to_everyone, reduce_and_broadcast, ring, gloo]
    if MPI and MPI.COMM_WORLD.size == world_size:
        algorithms.append(mpi)
    random = torch.Generator().manual_seed(rank)
    if rank == 0:
        print(f"{world_size} ranks; sent: by the rank that sends most; ms: of the slowest rank\n\n"
              "   S, bytes            algorithm steps sent, bytes  ms: median (least..most)")
    for size in args.sizes:
        # Sums of these integers are exact in any order, on up to 16,000 ranks: below 2^24.
        numbers = torch.randint(1000, (size // 4,), generator=random).float()
        for algorithm in algorithms:
            record = measure(algorithm, numbers, args.repeats)
            if rank == 0:
                sent = f"{max(record['bytes_sent']):,}" if record["bytes_sent"] else ""
                median, least, most = (1000 * record[key] for key in ("seconds", "least", "most"))
                print(f"{size:11,} {algorithm.__name__:>20} {record['steps'] or '':>5} {sent:>11}"
                      f"{median:>11.3f} ({least:.3f}..{most:.3f})", flush=True)
            if rank == 0 and args.results:
                with open(args.results, "a") as file:
                    print(json.dumps(record), file=file)
    if rank == 0:
        print("\nall sums: equal to gloo's on every rank, bit for bit")
    dist.barrier()  # no rank leaves while others wait for its messages


if __name__ == "__main__":
    run(main)
