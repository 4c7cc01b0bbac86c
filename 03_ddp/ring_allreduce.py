"""Count the bytes of three all-reduces, and compare their times with gloo's and MPI's.

    mpiexec -n 4 python ring_allreduce.py --sizes 4096 1048576 16777216    # without: 4 kB to 64 MB
    mpiexec -n 3 python ring_allreduce.py --sizes 4000 --results ring.jsonl

An all-reduce gives every rank the sum over all ranks. Three functions below use only messages from
one rank to another. They change a one-dimensional CPU tensor in place. S is its size in bytes, and
N the number of ranks.
"""

import functools
import json
import os
import platform
import statistics
import sys
import time

import torch
import torch.distributed as dist

from workshop.devices import gather
from workshop.flags import Parser, refuse_unwritable
from workshop.ranks import find_launcher, find_ranks, run

SIZES = [4096 * 4**k for k in range(8)]  # bytes: 4 kB to 64 MB
REPEATS, WARM_UP = 15, 2


class Network:
    """Send and receive tensors; count the bytes that this rank sends, and the steps."""

    def __init__(self):
        self.bytes = self.steps = 0

    def exchange(self, sends, receives):
        """Send and receive at the same time, as one step. Both arguments list (tensor, rank)."""
        # Receives first, so that no send has to wait for its receive.
        requests = [dist.irecv(tensor, rank) for tensor, rank in receives]
        requests += [dist.isend(tensor, rank) for tensor, rank in sends]
        for request in requests:
            request.wait()
        self.bytes += sum(tensor.nbytes for tensor, _ in sends)
        self.steps += 1


@functools.lru_cache(maxsize=3)
def receive_buffers(count, length, dtype):
    """Return `count` buffers. Later calls get the same ones, because an allocation costs time."""
    return torch.empty(count, length, dtype=dtype)


def everyone_to_everyone(tensor, network):
    """Send each rank's whole tensor to all others: one step, (N-1) S bytes from each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(world_size) if other != rank]
    parts = receive_buffers(world_size, len(tensor), tensor.dtype)
    parts[rank] = tensor
    sends = [(tensor, other) for other in others]
    receives = [(parts[other], other) for other in others]
    network.exchange(sends, receives)
    torch.sum(parts, 0, out=tensor)  # the same order on every rank, so the same rounding


def reduce_and_broadcast(tensor, network):
    """Send all tensors to rank 0, and from there their sum to all ranks.

    Two steps: (N-1) S bytes from rank 0, and S from each other rank.
    """
    others = range(1, dist.get_world_size())
    if dist.get_rank() > 0:
        network.exchange([(tensor, 0)], [])
        network.exchange([], [(tensor, 0)])
        return
    parts = receive_buffers(len(others), len(tensor), tensor.dtype)
    network.exchange([], list(zip(parts, others)))
    for part in parts:
        tensor += part
    network.exchange([(tensor, other) for other in others], [])


def ring(tensor: torch.Tensor, network: Network) -> None:
    """Send chunks around a ring: each rank sends only to its right neighbour.

    2(N-1) steps of S/N bytes, so 2(N-1)/N S bytes from each rank. A tensor that N does not divide
    is padded: S then includes up to N-1 zeros.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    padding = -len(tensor) % world_size
    padded = torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor
    chunks = padded.view(world_size, -1)
    received, = receive_buffers(1, chunks.shape[1], tensor.dtype)
    for step in range(world_size - 1):  # reduce-scatter: then rank r has the sum of chunk r + 1
        network.exchange([(chunks[(rank - step) % world_size], right)], [(received, left)])
        chunks[(rank - step - 1) % world_size] += received
    for step in range(world_size - 1):  # all-gather: all ranks get all sums
        network.exchange([(chunks[(rank - step + 1) % world_size], right)],
                         [(chunks[(rank - step) % world_size], left)])
    if padding:
        tensor.copy_(padded[:len(tensor)])


def gloo(tensor, network):
    """Run gloo's all-reduce, without counting its bytes."""
    dist.all_reduce(tensor)


def mpi(tensor, network):
    """Run MPI's all-reduce, without counting its bytes."""
    from mpi4py import MPI
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())


ALGORITHMS = (everyone_to_everyone, reduce_and_broadcast, ring, gloo, mpi)


def measure(size, repeats):
    """Time all algorithms in turn, on a float32 tensor of `size` bytes; return their records.

    A run takes as long as its slowest rank. On up to 16,000 ranks the sums are integers below 2^24,
    so exact in any order. Raises ArithmeticError if a sum differs from gloo's.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(rank)
    numbers = torch.randint(1000, (size // 4,), generator=random).float()
    tensor, total = numbers.clone(), numbers.clone()
    dist.all_reduce(total)
    seconds, networks = {algorithm: [] for algorithm in ALGORITHMS}, {}
    for _ in range(WARM_UP + repeats):
        for algorithm in ALGORITHMS:
            tensor.copy_(numbers)
            networks[algorithm] = Network()
            dist.barrier()
            started = time.perf_counter()
            algorithm(tensor, networks[algorithm])
            seconds[algorithm].append(time.perf_counter() - started)
            if not torch.equal(tensor, total):
                raise ArithmeticError(f"{algorithm.__name__}: wrong sum on rank {rank}")
    records = []
    for algorithm in ALGORITHMS:
        network = networks[algorithm]
        rank_seconds, bytes_sent = zip(*gather((seconds[algorithm][WARM_UP:], network.bytes)))
        slowest = [max(run_seconds) for run_seconds in zip(*rank_seconds)]
        records.append({"algorithm": algorithm.__name__, "ranks": world_size, "bytes": size,
                        "repeats": repeats, "seconds": statistics.median(slowest),
                        "least": min(slowest), "most": max(slowest),
                        "bytes_sent": bytes_sent if network.steps else None,
                        "steps": network.steps or None})
    return records


def table_row(record):
    size, world_size = record["bytes"], record["ranks"]
    steps = most_bytes = ""
    if record["bytes_sent"]:
        steps, most_bytes = record["steps"], f"{max(record['bytes_sent']):,}"
    median, least, most = (f"{1000 * record[key]:.3f}" for key in ("seconds", "least", "most"))
    bus_speed = 2 * (world_size - 1) / world_size * size / record["seconds"] / 1e9
    return (f"{size:11,} {record['algorithm']:>20} {steps:>5} {most_bytes:>11} "
            f"{f'{median} ({least}..{most})':>30} {bus_speed:9.2f}")


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES",
        help="sizes of the float32 tensor, multiples of 4 (4096 to 67108864, in steps of 4x)")
    add("--repeats", type=int, default=REPEATS,
        help=f"timed runs of each algorithm, after {WARM_UP} for warm-up ({REPEATS})")
    add("--results", metavar="FILE", help="append one JSON line per size and algorithm")
    args = parser.parse_args()
    for size in args.sizes:
        if size < 4 or size % 4:
            parser.error(f"--sizes {size}: use a multiple of 4, because a float32 has 4 bytes")
    if args.repeats < 1:
        parser.error("--repeats has to be 1 or more")
    return args


def print_heading(world_size, repeats, library):
    cores = os.cpu_count()
    print(f"{world_size} ranks on {cores} cores of {platform.node()}, torch {torch.__version__}, "
          f"{library}")
    if world_size > cores:
        print("more ranks than cores: they wait for cores, too, and the times are not those of "
              "the algorithms")
    print(f"median (least..most) of {repeats} runs; a run takes as long as its slowest rank")
    print("sent: by the rank that sends most; bus: 2(N-1)/N S / time, what each rank of a ring "
          "sends per second\n")
    print(f"{'S, bytes':>11} {'algorithm':>20} {'steps':>5} {'sent, bytes':>11} {'ms':>30} "
          f"{'bus, GB/s':>9}", flush=True)


def main():
    args = parse_args()
    launcher, _, world_size = find_launcher()
    if world_size == 1 or launcher in ("torchrun", "srun"):  # without MPI
        sys.exit("start two or more ranks with MPI: mpiexec -n 2 python ring_allreduce.py "
                 "(the mpiexec next to python)")
    from mpi4py import MPI  # starts MPI, else find_ranks() would finalize it
    rank, world_size, _ = find_ranks()
    refuse_unwritable(args.results)
    torch.set_num_threads(1)  # the ranks share the cores of their node
    dist.init_process_group("gloo")
    library = " ".join(MPI.Get_library_version().splitlines()[0].split())
    if rank == 0:
        print_heading(world_size, args.repeats, library)
    for size in args.sizes:
        records = measure(size, args.repeats)
        if rank == 0:
            print(*map(table_row, records), sep="\n", flush=True)
        if rank == 0 and args.results:
            machine = {"cpus": os.cpu_count(), "mpi": library}
            with open(args.results, "a") as file:
                file.writelines(json.dumps(record | machine) + "\n" for record in records)
    if rank == 0:
        print("\nall sums: equal to gloo's on every rank, bit for bit")
    dist.barrier()  # no rank leaves while others wait for its messages


if __name__ == "__main__":
    run(main)
