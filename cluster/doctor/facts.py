"""The facts that the doctor collects on each rank, and what the facts of all ranks show."""

import os
import re
import site
import socket
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import find_spec

import psutil
import torch

from workshop.devices import identify_gpu

OWN_PACKAGES = site.getusersitepackages()  # ~/.local/lib/python3.N/site-packages
DRIVERS = "/dev/nvidia0", "/usr/lib/wsl/lib/libcuda.so.1"  # the latter in WSL2
VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME",
             "SLURM_GPUS_ON_NODE", "SLURM_JOB_NUM_NODES")
IMPORTS = {"mpi4py": "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI",
           "horovod": "import horovod.torch as hvd; hvd.init",
           "deepspeed": "import deepspeed"}  # none of these calls MPI_Init
BUILD_ADVICE = "install another build of PyTorch (docs/SETUP.md, Versions)"
GPU_ADVICE = f"look at nvidia-smi, try another node, or {BUILD_ADVICE}"
NETWORK_ADVICE = ("set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, best in the site's file, to an "
                  "interface of the cluster's network; a firewall must leave all ports open "
                  "between nodes; NCCL_DEBUG=INFO prints more")


# The facts of a rank

def examine():
    """Return what this rank sees, as a dictionary that JSON can hold."""
    local_rank = int(os.environ["LOCAL_RANK"])
    gpu = find_accelerator()
    count = torch.accelerator.device_count() if gpu else 0
    gpus = [identify_gpu(torch.device(gpu.type, index)) for index in range(count)]
    cores = range(os.cpu_count())
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = os.sched_getaffinity(0)
    return {"node": socket.gethostname(), "local_rank": local_rank, "gpus": gpus,
            "gpu": gpus[local_rank % count] if gpus else None,
            "gpu_problem": find_gpu_problem(local_rank),
            "cuda": torch.version.cuda or f"none, ROCm: {torch.version.hip}",
            "has_driver": any(map(os.path.exists, DRIVERS)),
            "cores": sorted(cores), "all_cores": os.cpu_count(),
            "versions": describe_versions(), "own_packages": find_own_packages(),
            "gloo": os.environ.get("GLOO_SOCKET_IFNAME") or find_own_address() or "127.0.0.1",
            "own_address": find_own_address(), "interfaces": ", ".join(psutil.net_if_addrs()),
            **{name: os.environ.get(name, "not set") for name in VARIABLES}}


def find_accelerator(check_available=True):
    """Return the kind of GPU that the chapters would train on, as a torch.device, or None."""
    gpu = torch.accelerator.current_accelerator(check_available)
    return None if gpu and gpu.type == "mps" else gpu


def find_gpu_problem(local_rank):
    """Choose this rank's GPU; return why PyTorch cannot run a kernel on it, or ""."""
    gpu = find_accelerator(check_available=False) or torch.device("cuda")
    try:
        torch.get_device_module(gpu).init()  # raises without a driver, or in a PyTorch for CPUs
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
        torch.ones(1, device=gpu).add(1).item()
    except (AssertionError, RuntimeError) as problem:
        return str(problem).splitlines()[0]
    return ""


def describe_versions():
    """Return the versions that must be the same on all nodes, as text."""
    versions = {package.name.lower(): package.version for package in distributions()}
    has_nccl = torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none"
    mpi = sys.modules.get("mpi4py.MPI")
    library = re.split("[\n,]", mpi.Get_library_version())[0] if mpi else "no MPI"
    return (f"Python {sys.version.split()[0]}, torch {torch.__version__}, NCCL {nccl}, "
            f"{' '.join(library.split())} loaded, "
            f"Horovod {versions.get('horovod', 'not installed')}, "
            f"DeepSpeed {versions.get('deepspeed', 'not installed')}")


def find_broken_packages(seconds):
    """Yield which of IMPORTS fail, and why; each has its own process, for it may crash or hang."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [subprocess.Popen([sys.executable, "-c", statement], text=True, **pipes)
                 for package, statement in IMPORTS.items() if find_spec(package)]
    for process in processes:
        try:
            lines = process.communicate(timeout=seconds)[0].splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            lines = [f"it takes more than {seconds:g} s (--timeout)"]
        lines += [line for line in lines if "has not been built" in line]  # Horovod's reason
        if process.wait():
            yield (f"`{process.args[-1]}` fails ({process.returncode}): {''.join(lines[-1:])}: "
                   "look for this in docs/WHAT_GOES_WRONG.md")


def find_own_packages():
    """Return the imported packages that come from ~/.local."""
    return sorted(name for name, module in sys.modules.items() if "." not in name
                  and (getattr(module, "__file__", None) or "").startswith(OWN_PACKAGES))


def find_own_address():
    """Return the address of this node's hostname, "" if it has none, or another machine's."""
    try:
        with socket.create_server((socket.gethostbyname(socket.gethostname()), 0)) as server:
            return server.getsockname()[0]
    except OSError:
        return ""


# The findings of all facts: ("wrong", text) if ranks cannot train so, ("note", text) if they can

def find_problems(ranks):
    """Return all findings. ranks: the facts of each rank."""
    nodes = group_by_node(ranks)
    findings = [*find_job_problems(ranks, len(nodes))]
    for node, node_ranks in nodes.items():
        for severity, text in (*find_gpu_problems(node_ranks, any(rank["gpu"] for rank in ranks)),
                               *find_node_problems(node_ranks, ranks[0], len(nodes))):
            findings.append((severity, f"{node}: {text}"))
    return findings


def find_job_problems(ranks, nodes):
    """Yield the findings that concern the whole job, on this number of nodes."""
    first = ranks[0]
    if first["own_packages"]:
        yield "note", (f"{', '.join(first['own_packages'])} come from your own {OWN_PACKAGES}, not "
                       "from the environment: export PYTHONNOUSERSITE=1")
    gpus = to_number(first["SLURM_GPUS_ON_NODE"])
    if gpus and not any(facts["gpus"] for facts in ranks):
        yield "note", (f"the job has {gpus} GPUs per node, and PyTorch sees none of them; it is "
                       f"built for CUDA: {first['cuda']}; CUDA_VISIBLE_DEVICES: "
                       f"{first['CUDA_VISIBLE_DEVICES']}, ROCR_VISIBLE_DEVICES: "
                       f"{first['ROCR_VISIBLE_DEVICES']} (try without them)")
    if to_number(first["SLURM_JOB_NUM_NODES"]) > nodes:
        yield "note", (f"the job has {first['SLURM_JOB_NUM_NODES']} nodes (SLURM_JOB_NUM_NODES), "
                       f"and these ranks are on {nodes}: see submit/README.md, Without a site file")


def find_gpu_problems(node_ranks, any_gpu):
    """Yield the findings on the GPUs of one node. any_gpu: does a rank of any node see one?"""
    gpus = {gpu for facts in node_ranks for gpu in facts["gpus"]}
    used = [facts["gpu"] for facts in node_ranks]
    if None in used and (node_ranks[0]["has_driver"] or any_gpu):
        facts = node_ranks[used.index(None)]
        visible = facts["CUDA_VISIBLE_DEVICES"] or "empty, which hides all GPUs"
        yield "wrong", (f"a rank sees no GPU: {facts['gpu_problem']:.150}: ask for one GPU per "
                        f"rank, or unset CUDA_VISIBLE_DEVICES ({visible}), or {BUILD_ADVICE}")
    elif gpus and len(node_ranks) > len(gpus):
        yield "wrong", (f"{len(node_ranks)} ranks see {len(gpus)} GPUs: start one rank per GPU "
                        "(mpiexec --ppn, srun --ntasks-per-node, torchrun --nproc-per-node)")
    elif gpus and len(set(used)) < len(used):
        yield "wrong", ("several ranks use the same GPU, or slices (MIG) of it: unset "
                        "CUDA_VISIBLE_DEVICES, or set it to another GPU for each rank; start at "
                        "most one torchrun per node")
    else:
        for facts in node_ranks:
            if facts["gpu"] and facts["gpu_problem"]:
                yield "wrong", (f"cannot run a kernel on {facts['gpu']}: "
                                f"{facts['gpu_problem']:.150}: {GPU_ADVICE}")


def find_node_problems(node_ranks, rank_0, nodes):
    """Yield the findings on one node's cores, network and versions. rank_0: its facts."""
    first = node_ranks[0]
    cores = {core for facts in node_ranks for core in facts["cores"]}
    if len(cores) < min(len(node_ranks), first["all_cores"]):
        yield "wrong", (f"{len(node_ranks)} ranks are bound to core {format_ranges(cores)}: "
                        "mpiexec --depth --cpu-bind, srun --cpus-per-task, --bind-to none")
    one_core = min(len(facts["cores"]) for facts in node_ranks) == 1
    if one_core and first["all_cores"] > 2 * len(node_ranks):
        yield "note", (f"a rank has 1 of {first['all_cores']} cores, also for its data workers: "
                       "srun --cpus-per-task, mpiexec --depth, or --bind-to none")
    if not first["own_address"]:
        yield "note", ("its hostname leads to no address of this node, so torchrun may hang: "
                       "torchrun --local-addr 127.0.0.1 on one node, or a line in /etc/hosts")
    if nodes > 1 and first["gloo"].startswith("127."):
        yield "wrong", (f"its hostname resolves to {first['gloo']}, which other nodes cannot "
                        f"reach: {NETWORK_ADVICE}")
    if first["versions"] != rank_0["versions"]:
        yield "wrong", (f"versions differ from rank 0's, {first['versions']}: activate one "
                        "environment on all nodes")


def to_number(text):
    """Return a variable's value as a whole number, 0 if it is none."""
    return int(text) if text.isdecimal() else 0


def group_by_node(ranks):
    """Return {node: the facts of its ranks}."""
    nodes = {}
    for facts in ranks:
        nodes.setdefault(facts["node"], []).append(facts)
    return nodes


def format_ranges(numbers):
    """Return whole numbers as text, such as 0-3,7."""
    ranges = []  # [first, last] of each
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)


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
              f"NCCL_SOCKET_IFNAME: {node_ranks[0]['NCCL_SOCKET_IFNAME']}")
    for rank, facts in enumerate(ranks):
        gpu = (facts["gpu"] or "none").partition(" of ")[0]
        print(f"rank {rank}: {facts['node']}, local rank {facts['local_rank']}, "
              f"CPU cores: {format_ranges(facts['cores'])}, GPUs: {len(facts['gpus'])} "
              f"(CUDA_VISIBLE_DEVICES: {facts['CUDA_VISIBLE_DEVICES']}), uses: {gpu}")
