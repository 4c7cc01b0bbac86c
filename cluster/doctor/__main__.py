"""Find out what keeps ranks from training together.

Run it first on a compute node, started exactly as a chapter is:

    mpiexec -n 4 python -m cluster.doctor       # or srun; torchrun -m; python alone is one rank

It changes nothing, and ends by itself. It reports each problem in one line, with what to do. The
exit code is 0 if it finds none.
"""

import argparse
import json
import math
import os
import site
import socket
import statistics
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from workshop.devices import gather, short_reason
from workshop.ending import run
from workshop.flags import Parser
from workshop.ranks import find_launcher, find_ranks

SIZES = {"4 kB": 2**12, "1 MB": 2**20, "16 MB": 2**24, "256 MB": 2**28}  # the last on GPUs only
# For bash: wait until the rank closes the pipe; if $1 seconds have passed, print $2, and kill it
WATCHDOG = 'read -t "$1"; if [ "$SECONDS" -ge "$1" ]; then echo "$2" >&2; kill -KILL "$3"; fi'

MPI_ADVICE = "under mpiexec try `mpiexec -n 2 hostname`, then the site's own MPI example"
RENDEZVOUS_ADVICE = ("start all ranks, with one MASTER_ADDR, the address of rank 0's node, and one "
                     "MASTER_PORT, free there and open in the firewall; if they start late: "
                     "--timeout")
ONE_NODE_ADVICE = ("set NCCL_P2P_DISABLE=1; is /dev/shm large enough (df -h /dev/shm)? "
                   "NCCL_DEBUG=INFO prints more")


# What one rank can tell before it connects to the others

def refuse_broken_packages():
    """Exit if psutil or torch cannot be imported, or is too old; name the file at fault."""
    try:
        import psutil  # noqa: F401
        import torch
    except (ImportError, OSError) as problem:
        files = [frame.filename for frame in traceback.extract_tb(problem.__traceback__)]
        file = [sys.executable, *filter(os.path.isabs, files[1:])][-1]
        sys.exit(f"{short_reason(problem)}, in {file}{describe_folders()}")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        sys.exit(f"torch {torch.__version__} in {torch.__file__} is older than 2.7, the first with "
                 f"what the chapters ask for GPUs{describe_folders()}")


def describe_folders():
    """Return as text the folders outside the environment that Python and libraries search."""
    advice = [f"{name}={os.environ[name]}: unset it, if the file comes from there"
              for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if os.environ.get(name)]
    if (folder := site.getusersitepackages()) in sys.path:
        advice.append(f"python searches your own {folder}: export PYTHONNOUSERSITE=1")
    return "; ".join(["", *advice])


def refuse_unknown_launcher():
    """Exit if something has started this program several times, each time as the only rank."""
    import psutil
    this = psutil.Process()
    time.sleep(max(0, this.create_time() + 3 - time.time()))  # until all have been started
    identity = {"ppid": this.ppid(), "cmdline": this.cmdline()}
    count = sum(process.info == identity for process in psutil.process_iter(["ppid", "cmdline"]))
    if count > 1:
        time.sleep(3)  # until processes that were started later have counted this one, too
        sys.exit(f"{count} processes on {socket.gethostname()} each believe they are rank 0 of 1, "
                 "and would train alone: start them with mpiexec, srun or torchrun")


@contextmanager
def stage(name, advice, seconds, rank):
    """End this rank with one line if the block hangs or raises an exception.

    A process of its own watches the rank, because MPI_Init can block all threads.
    """
    limit = math.ceil(3 + seconds * min(2, rank + 1))  # after PyTorch's; rank 0's first
    line = f"doctor: {name} timed out after {seconds:g} s: {advice}"
    command = ["bash", "-c", WATCHDOG, "bash", str(limit), line, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        try:
            yield
        except Exception as problem:
            sys.exit(f"{name} failed: {type(problem).__name__}: {short_reason(problem)}: {advice}")


# The stages in which the ranks work together

def judge(store, launcher, rank, world_size):
    """Let rank 0 judge the facts of all ranks; all ranks exit if something is wrong."""
    from cluster.doctor.facts import find_problems, print_facts
    if rank == 0:
        ranks = [json.loads(store.get(f"facts of rank {other}")) for other in range(world_size)]
        print_facts(ranks, launcher)
        findings = find_problems(ranks)
        for severity, text in findings:
            print(f"{severity}: {text}")
        store.set("verdict", "wrong" if "wrong" in dict(findings) else "right")
    if store.get("verdict") == b"wrong":
        time.sleep(1)  # until rank 0 has printed
        sys.exit(1)


def measure_all_reduces(library, device):
    """Time and check all-reduces of several sizes, over this library; rank 0 prints the times."""
    import torch.distributed as dist
    world_size = dist.get_world_size()
    for name, size in list(SIZES.items())[:3 if device == "cpu" else 4]:
        median = time_all_reduce(size, device)
        bandwidth = 2 * (world_size - 1) / world_size * size / median / 1e9
        if dist.get_rank() == 0:
            print(f"all-reduce over {library}, {name}: {median:.6f} s, "
                  f"bus bandwidth {bandwidth:.3f} GB/s")


def time_all_reduce(size, device):
    """Return the median seconds of all-reduces of `size` bytes; raise if a sum is wrong."""
    import torch
    import torch.distributed as dist
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.empty(size // 4, device=device)
    times = []
    for _ in range(6):
        tensor.fill_(rank + 1)
        tensor[0].item()  # wait until the GPU is idle
        started = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()
        times.append(time.perf_counter() - started)
        if not (tensor == world_size * (world_size + 1) / 2).all():
            raise ValueError("a wrong sum (try NCCL_NET=Socket)")
    return statistics.median(times[1:])  # the first all-reduce also connects the ranks


def parse_flags():
    sys.argv[0] = "doctor"  # the name in messages
    parser = Parser(__doc__, prog="doctor")
    parser.add_argument("--timeout", type=float, default=60,
                        help="seconds to wait for other ranks (60)")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # of launchers
    return parser.parse_args()


def main():
    args = parse_flags()
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # exceptions repeat these lines
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # the WATCHDOG ends ranks that hang
    refuse_broken_packages()
    import torch.distributed as dist

    from cluster.doctor import facts

    launcher, rank, world_size = find_launcher()
    if world_size == 1:
        refuse_unknown_launcher()
    guarded = partial(stage, seconds=args.timeout, rank=rank)
    with guarded("find_ranks()", MPI_ADVICE):  # it may call MPI_Init
        find_ranks()  # it sets MASTER_ADDR and MASTER_PORT
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    timeout = timedelta(seconds=args.timeout)
    with guarded(f"rendezvous at {host}:{port}", RENDEZVOUS_ADVICE):
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
    with guarded("looking at this rank's GPUs", facts.GPU_ADVICE):
        store.set(f"facts of rank {rank}", json.dumps(facts.examine()))
    with guarded("waiting for what the other ranks see", RENDEZVOUS_ADVICE):
        judge(store, launcher, rank, world_size)

    gpu, backends = facts.find_accelerator(), "gloo"
    if gpu:
        library = dist.get_default_backend_for_device(gpu)
        backends = f"cpu:gloo,{gpu.type}:{library}"  # the chapters' own
    with guarded("the all-reduce over gloo", facts.NETWORK_ADVICE):
        dist.init_process_group(backends, timeout=timeout / 2, store=store, rank=rank,
                                world_size=world_size)
        nodes = len(set(gather(socket.gethostname())))
        measure_all_reduces("gloo", "cpu")
    if gpu:
        with guarded(f"the all-reduce over {library.upper()}",
                     facts.NETWORK_ADVICE if nodes > 1 else ONE_NODE_ADVICE):
            measure_all_reduces(library.upper(), gpu.type)
    gather(None)  # no rank exits early
    if rank == 0:
        if problems := list(facts.find_broken_packages(args.timeout)):
            sys.exit("\n".join(problems))
        print("no problems found")


if __name__ == "__main__":
    run(main)
