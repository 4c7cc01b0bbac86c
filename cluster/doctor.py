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
import re
import select
import signal
import site
import socket
import statistics
import sys
import time
import traceback
import warnings
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.metadata import distributions

from cluster.records import append_records
from workshop.devices import gather, identify_gpu, short_reason
from workshop.flags import Parser, refuse_unwritable
from workshop.ranks import find_launcher, find_ranks, run

if __name__ == "__main__":  # before torch is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # exceptions repeat these lines
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # the Guard ends ranks that hang

OWN_PACKAGES = site.getusersitepackages()  # ~/.local/lib/python3.N/site-packages


def why_this_file(text, file):
    """Return which variable or folder brought a file into this program, or a library, as text."""
    advice = "unset it, or unload the module that sets it"
    for folder in filter(os.path.isabs, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        if re.search(re.escape(folder.rstrip("/")) + r"/[^/\s]+\.so", text):
            return f", found by LD_LIBRARY_PATH={folder}: {advice}"
    python_path = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(":")
                   if path]
    for path in [file, *re.findall(r"/[^\s()':,]+", text)]:
        folder = max((folder for folder in sys.path if path.startswith(f"{folder}/")), key=len,
                     default="")  # the one in which Python has found it
        if folder in python_path:
            return f", found by PYTHONPATH={folder}: {advice}"
        if folder == OWN_PACKAGES:
            return f", found in your own {OWN_PACKAGES}: export PYTHONNOUSERSITE=1"
    return ""


def refuse_import(problem):
    """Exit with the reason why an import failed, the file that raised it, and what found it."""
    files = [frame.filename for frame in traceback.extract_tb(problem.__traceback__)]
    file = ["", *filter(os.path.isabs, files[1:])][-1]
    sys.exit(f"{short_reason(problem)}, in {file or sys.executable}"
             f"{why_this_file(str(problem), file)}")


try:
    import psutil
    import torch
    import torch.distributed as dist
except (ImportError, OSError) as problem:
    run(partial(refuse_import, problem))
if not hasattr(torch, "accelerator"):  # added in 2.6, the oldest that was tried
    sys.exit(f"doctor.py: torch {torch.__version__} in {torch.__file__} is older than 2.6, the "
             f"oldest that the chapters were tried with{why_this_file('', torch.__file__)}")

DRIVERS = "/dev/nvidia0", "/usr/lib/wsl/lib/libcuda.so.1"  # the latter in WSL2
SIZES = {"4 kB": 2**12, "1 MB": 2**20, "16 MB": 2**24, "256 MB": 2**28}  # the last on GPUs only
MPI_ADVICE = "try `mpiexec -n 2 hostname`, then the site's own MPI example"
RENDEZVOUS_ADVICE = ("start all ranks, with one MASTER_ADDR, the address of rank 0's node, and one "
                     "MASTER_PORT, free there and open in the firewall; if they start late: "
                     "--timeout")
BUILD_ADVICE = "install another build of PyTorch (docs/SETUP.md, Versions)"
GPU_ADVICE = f"look at nvidia-smi, try another node, or {BUILD_ADVICE}"
GLOO, NCCL = (os.environ.get(f"{name}_SOCKET_IFNAME", "not set") for name in ("GLOO", "NCCL"))
NETWORK_ADVICE = (f"set GLOO_SOCKET_IFNAME (now: {GLOO}) and NCCL_SOCKET_IFNAME (now: {NCCL}), "
                  "best in the site's file, to an interface of the cluster's network; a firewall "
                  "must leave all ports open between nodes; NCCL_DEBUG=INFO prints more")
ONE_NODE_ADVICE = ("set NCCL_P2P_DISABLE=1; is /dev/shm large enough (df -h /dev/shm)? "
                   "NCCL_DEBUG=INFO prints more")


# Time-outs

class Guard:
    """A process that kills this one after a time-out, because MPI_Init can block all threads."""

    def __init__(self, seconds, rank):
        self.seconds = seconds
        pipe_output, self.pipe_input = os.pipe()
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        if os.fork() == 0:
            os.close(self.pipe_input)
            self.wait(pipe_output, 3 + seconds * min(2, rank + 1))  # rank 0 gives up first

    def wait(self, pipe_output, limit):
        """If a stage exceeds the limit, print its line, and kill the parent."""
        parent, line = os.getppid(), b""
        while select.select([pipe_output], [], [], limit)[0]:
            line = os.read(pipe_output, 9999)
            if not line:  # the parent has ended
                os._exit(0)
        os.write(2, line)
        os.kill(parent, signal.SIGKILL)
        os._exit(0)

    @contextmanager
    def stage(self, name, advice):
        """End this rank with one line if the block hangs or raises an exception."""
        line = f"doctor.py: {name} timed out after {self.seconds:g} s: {advice}\n"
        os.write(self.pipe_input, line.encode())
        try:
            yield
        except Exception as problem:
            os.close(self.pipe_input)  # the Guard ends
            sys.exit(f"{name} failed: {type(problem).__name__}: {short_reason(problem)}: {advice}")


def refuse_unknown_host(host):
    """Exit if MASTER_ADDR has no address here: PyTorch would try again until its time-out."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as problem:
        sys.exit(f"MASTER_ADDR={host} has no address on {socket.gethostname()}: {problem.strerror}")


def refuse_unknown_launcher():
    """Exit if something has started this program several times, each time as the only rank."""
    this = psutil.Process()
    time.sleep(max(0, this.create_time() + 3 - time.time()))  # until all have been started
    identity = {"ppid": this.ppid(), "cmdline": this.cmdline()}
    count = sum(process.info == identity for process in psutil.process_iter(["ppid", "cmdline"]))
    if count > 1:
        time.sleep(3)  # until processes that were started later have counted this one, too
        sys.exit(f"{count} processes on {socket.gethostname()} each believe they are rank 0 of 1, "
                 "and would train alone: start them with mpiexec, srun or torchrun")


# What each rank sees

def describe_versions():
    """Return the versions that must be the same on all nodes, as text."""
    versions = {package.name.lower(): package.version for package in distributions()}
    mpi = sys.modules.get("mpi4py.MPI")
    library = re.split("[\n,]", mpi.Get_library_version())[0] if mpi else "no MPI"
    return (f"Python {sys.version.split()[0]}, torch {torch.__version__}, "
            f"{' '.join(library.split())} loaded, "
            f"Horovod {versions.get('horovod', 'not installed')}, "
            f"DeepSpeed {versions.get('deepspeed', 'not installed')}")


def gloo_interface():
    """Return the interface that gloo is set to use, or the address of this node's hostname."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    return os.environ.get("GLOO_SOCKET_IFNAME") or address


def find_gpu_problem(local_rank):
    """Return PyTorch's reason why this rank cannot run a kernel on its GPU, or ""."""
    try:
        torch.cuda.init()  # raises if the driver is too old, or this PyTorch has no CUDA
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        torch.ones(1, device="cuda").add(1).item()
    except (AssertionError, RuntimeError) as problem:
        return str(problem).splitlines()[0]
    return ""


def examine():
    """Return the facts of this rank: node, GPUs, cores, versions, interfaces."""
    local_rank = int(os.environ["LOCAL_RANK"])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [identify_gpu(index) for index in range(count)]
    cores = range(os.cpu_count())
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = os.sched_getaffinity(0)
    return {"node": socket.gethostname(), "local_rank": local_rank, "gpus": gpus,
            "gpu": gpus[local_rank % count] if gpus else None,
            "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
            "has_driver": any(map(os.path.exists, DRIVERS)),
            "gpu_problem": find_gpu_problem(local_rank), "cores": sorted(cores),
            "all_cores": os.cpu_count(), "versions": describe_versions(), "gloo": gloo_interface(),
            "nccl": os.environ.get("NCCL_SOCKET_IFNAME", "not set"),
            "interfaces": ", ".join(psutil.net_if_addrs())}


# What rank 0 concludes

def format_ranges(numbers):
    """Return whole numbers as text, such as 0-3,7."""
    ranges = []  # [first, last] of each
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)


def group_by_node(ranks):
    """Return {node: the facts of its ranks}."""
    nodes = {}
    for facts in ranks:
        nodes.setdefault(facts["node"], []).append(facts)
    return nodes


def print_facts(ranks, launcher):
    """Print the facts, node by node and rank by rank."""
    nodes = group_by_node(ranks)
    print(f"launcher: {launcher or 'none'}")
    print(f"versions: {ranks[0]['versions']}")
    print(f"ranks: {len(ranks)}, nodes: {len(nodes)}")
    for node, node_ranks in nodes.items():
        local_ranks = format_ranges(facts["local_rank"] for facts in node_ranks)
        print(f"node {node}: local ranks {local_ranks}, "
              f"interfaces {node_ranks[0]['interfaces']}, gloo uses {node_ranks[0]['gloo']}, "
              f"NCCL_SOCKET_IFNAME: {node_ranks[0]['nccl']}")
    for rank, facts in enumerate(ranks):
        gpu = (facts["gpu"] or "none").partition(" of ")[0]
        print(f"rank {rank}: {facts['node']}, local rank {facts['local_rank']}, "
              f"CPU cores: {format_ranges(facts['cores'])}, GPUs: {len(facts['gpus'])} "
              f"(CUDA_VISIBLE_DEVICES: {facts['visible_devices']}), uses: {gpu}")
    own = sorted(name for name, module in sys.modules.items() if "." not in name
                 and (getattr(module, "__file__", None) or "").startswith(OWN_PACKAGES))
    if own:
        print(f"note: {', '.join(own)} come from your own {OWN_PACKAGES}, not from the "
              "environment: export PYTHONNOUSERSITE=1")
    requested = os.environ.get("SLURM_GPUS_ON_NODE")
    if requested and not any(facts["gpus"] for facts in ranks):
        print(f"note: the job has {requested} GPUs per node, and PyTorch sees none of them; it is "
              f"built for CUDA: {torch.version.cuda}")
    job_nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if job_nodes.isdecimal() and int(job_nodes) > len(nodes):
        print(f"note: the job has {job_nodes} nodes, and these ranks are on {len(nodes)}: see "
              "submit/README.md, Without a site file")
    if torch.xpu.is_available():
        print("note: doctor.py does not check Intel GPUs")
    for node, node_ranks in nodes.items():
        cores = min(len(facts["cores"]) for facts in node_ranks)
        if cores == 1 and node_ranks[0]["all_cores"] > 2 * len(node_ranks):
            print(f"note: {node}: a rank has 1 of {node_ranks[0]['all_cores']} cores, also for its "
                  "data workers: srun --cpus-per-task, mpiexec --depth, or --bind-to none")


def diagnose(ranks):
    """Return the problems in the facts of all ranks, as lines."""
    findings, nodes = [], group_by_node(ranks)
    any_gpu = any(facts["gpu"] for facts in ranks)
    for node, node_ranks in nodes.items():
        findings += [f"{node}: {text}" for text in diagnose_gpus(node_ranks, any_gpu)]
        cores = {core for facts in node_ranks for core in facts["cores"]}
        if len(cores) < min(len(node_ranks), node_ranks[0]["all_cores"]):
            findings.append(f"{node}: {len(node_ranks)} ranks are bound to core "
                            f"{format_ranges(cores)}: mpiexec --depth --cpu-bind, "
                            "srun --cpus-per-task, --bind-to none")
        if len(nodes) > 1 and node_ranks[0]["gloo"].startswith("127."):
            findings.append(f"{node}: its hostname resolves to {node_ranks[0]['gloo']}, which "
                            f"other nodes cannot reach: {NETWORK_ADVICE}")
        if node_ranks[0]["versions"] != ranks[0]["versions"]:
            findings.append(f"{node}: versions differ from rank 0's, {node_ranks[0]['versions']}: "
                            "activate one environment on all nodes")
    return findings


def diagnose_gpus(node_ranks, any_gpu):
    """Return the problems with the GPUs of one node's ranks, as lines."""
    gpus = {gpu for facts in node_ranks for gpu in facts["gpus"]}
    used = [facts["gpu"] for facts in node_ranks]
    if None in used and (node_ranks[0]["has_driver"] or any_gpu):
        facts = node_ranks[used.index(None)]
        return [f"a rank sees no GPU: {facts['gpu_problem']:.150}: ask for one GPU per rank "
                f"(CUDA_VISIBLE_DEVICES: {facts['visible_devices']}), or {BUILD_ADVICE}"]
    if gpus and len(node_ranks) > len(gpus):
        return [f"{len(node_ranks)} ranks see {len(gpus)} GPUs: start one rank per GPU (mpiexec "
                "--ppn, srun --ntasks-per-node, torchrun --nproc-per-node)"]
    if gpus and len(set(used)) < len(used):
        return ["several ranks use the same GPU, or slices (MIG) of it: unset "
                "CUDA_VISIBLE_DEVICES, or set it to another GPU for each rank; start at most one "
                "torchrun per node"]
    return [f"cannot run a kernel on {facts['gpu']}: {facts['gpu_problem']:.150}: {GPU_ADVICE}"
            for facts in node_ranks if facts["gpu"] and facts["gpu_problem"]]


def judge(store, launcher, rank, world_size):
    """Let rank 0 judge the facts of all ranks; all ranks exit if something is wrong."""
    if rank == 0:
        names = [f"facts of rank {other}" for other in range(world_size)]
        ranks = [json.loads(store.get(name)) for name in names]
        print_facts(ranks, launcher)
        findings = diagnose(ranks)
        for line in findings:
            print(f"wrong: {line}")
        store.set("verdict", "wrong" if findings else "no problems")
    if store.get("verdict") == b"wrong":
        time.sleep(1)  # until rank 0 has printed
        sys.exit(1)


# The all-reduce

def time_all_reduce(size, device):
    """Return the median seconds of all-reduces of `size` bytes; raise if a sum is wrong."""
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


def connect(store, rank, world_size, seconds):
    """Initialize the process group with the chapters' backends; return the number of nodes."""
    backends = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        backends = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backends, timeout=timedelta(seconds=seconds / 2), store=store,
                            rank=rank, world_size=world_size)
    return len(set(gather(socket.gethostname())))


def measure_all_reduces(library, nodes):
    """Time and check all-reduces of several sizes over gloo or NCCL; return their records."""
    records, world_size = [], dist.get_world_size()
    device = "cuda" if library == "NCCL" else "cpu"
    for name, size in list(SIZES.items())[:3 if device == "cpu" else 4]:
        median = time_all_reduce(size, device)
        bandwidth = 2 * (world_size - 1) / world_size * size / median / 1e9
        records.append({"all_reduce": library, "bytes": size, "seconds": median,
                        "ranks": world_size, "nodes": nodes})
        if dist.get_rank() == 0:
            print(f"all-reduce over {library}, {name}: {median:.6f} s, "
                  f"bus bandwidth {bandwidth:.3f} GB/s")
    return records


def main():
    parser = Parser(__doc__)
    parser.add_argument("--timeout", type=float, default=60,
                        help="seconds to wait for other ranks (60)")
    parser.add_argument("--results", metavar="FILE",
                        help="append the all-reduces as lines of JSON, for predict.py")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # of launchers
    args = parser.parse_args()
    seconds = args.timeout
    if not 0 < seconds < math.inf:
        parser.error(f"--timeout {seconds}: must be more than 0 seconds")
    refuse_unwritable(args.results)
    sys.stdout.reconfigure(line_buffering=True)

    launcher, rank, world_size = find_launcher()
    if world_size == 1:
        refuse_unknown_launcher()
    guard = Guard(seconds, rank)
    uses_mpi = launcher in ("MPICH", "Open MPI")
    with guard.stage("MPI_Init" if uses_mpi else "find_ranks()", MPI_ADVICE if uses_mpi else ""):
        find_ranks()
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    address = f"{host}:{port}"
    refuse_unknown_host(host)
    with guard.stage(f"rendezvous at {address}", RENDEZVOUS_ADVICE):
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
    with guard.stage("looking at this rank's GPUs", GPU_ADVICE):
        store.set(f"facts of rank {rank}", json.dumps(examine()))
    with guard.stage("waiting for what the other ranks see", RENDEZVOUS_ADVICE):
        judge(store, launcher, rank, world_size)
    with guard.stage("the all-reduce over gloo", NETWORK_ADVICE):
        nodes = connect(store, rank, world_size, seconds)
        records = measure_all_reduces("gloo", nodes)
    if torch.cuda.is_available():
        with guard.stage("the all-reduce over NCCL",
                         NETWORK_ADVICE if nodes > 1 else ONE_NODE_ADVICE):
            records += measure_all_reduces("NCCL", nodes)
    gather(None)  # no rank exits early
    if rank == 0:
        print("no problems found")
        if args.results:
            append_records(args.results, *records)


if __name__ == "__main__":
    run(main)
