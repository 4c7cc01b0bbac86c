"""Find what keeps ranks from training together.

Run it first on a compute node, started exactly as a chapter is:

    mpiexec -n 4 python submit/doctor.py       # or srun, or torchrun; python alone is one rank

It changes nothing. A fault is a line of a table, symptom, cause and cure, and exit code 1; else it
says that nothing wrong was found. It ends by itself: where ranks wait for each other longer than
--timeout, that is the fault.
"""

import argparse
import errno
import importlib
import json
import math
import os
import re
import select
import signal
import socket
import statistics
import sys
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import distributions
from itertools import groupby

from ranks import find_ranks, launched

if __name__ == "__main__":  # before torch is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warnings between the lines
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # guard() ends what hangs
LAUNCHERS = {  # {as ranks.py calls them: in words}
    "horovodrun": "horovodrun",
    "Open MPI": "mpiexec of Open MPI",
    "MVAPICH": "mpiexec of MVAPICH2",
    "MPICH": "mpiexec of MPICH or Cray PALS, or srun --mpi=pmi2",
    "torchrun": "torchrun, or who set its five variables",
    "srun": "srun without MPI"}
VARIABLES = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "RANK", "WORLD_SIZE",
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
SIZES = {"4 kB": 2**12, "1 MB": 2**20, "16 MB": 2**24, "256 MB": 2**28}  # the last on GPUs only
FAULTS = {  # key: (symptom, cause, cure)
    "import": (
        "a package does not load",
        "this is not the Python of the workshop's environment, or modules are not loaded",
        "load the site's modules, activate the environment"),
    "contradiction": (
        "variables contradict each other",
        "the batch script itself runs Python, or a variable is left from another job",
        "start with srun or mpiexec; unset it"),
    "mpi": (
        "mpiexec and mpi4py are of different MPIs",
        "another mpiexec comes first on PATH, or mpi4py was built with another MPI",
        "take the mpiexec next to python, or build mpi4py with the site's MPI"),
    "launcher": (
        "each process takes itself for rank 0 of 1 and trains alone",
        "the launcher's variables are unknown here",
        "start with mpiexec, srun or torchrun"),
    "port": (
        "MASTER_PORT cannot be opened",
        "another program on rank 0's node has it, often a job that did not end",
        "unset MASTER_PORT, or choose a free one"),
    "meeting": (
        "ranks do not meet",
        "a firewall between nodes, a MASTER_ADDR that a node does not know, ranks that start late",
        "an address of the cluster's network as MASTER_ADDR; a greater --timeout"),
    "mpi meeting": (
        "MPI does not start",
        "its ranks do not reach each other, or some did not start",
        "try mpiexec -n 2 hostname, then the site's MPI example with the site's variables"),
    "interface": (
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface with an address",
        "mistyped, or another node's; gloo wants whole names, NCCL beginnings",
        "take one of those listed, or unset it"),
    "loopback": (
        "gloo takes an address that other nodes cannot reach",
        "the hostname resolves to 127.x, mostly in /etc/hosts",
        "set GLOO_SOCKET_IFNAME, best in the site's file, to an interface of the cluster's "
        "network (`ip address`)"),
    "too many ranks": (
        "more ranks on a node than GPUs that they see",
        "too many were started, or CUDA_VISIBLE_DEVICES hides GPUs",
        "one rank per GPU: mpiexec --ppn, srun --ntasks-per-node, torchrun --nproc-per-node"),
    "one GPU": (
        "several ranks have the same GPU",
        "their local ranks or their CUDA_VISIBLE_DEVICES are the same",
        "unset CUDA_VISIBLE_DEVICES, or give each rank its own; use one launcher per node"),
    "ordinal": (
        "`invalid device ordinal` in code that takes `cuda:LOCAL_RANK`",
        "each rank sees only its own GPU, as index 0",
        "nothing to do: the chapters take index 0, and tell DeepSpeed so"),
    "no CUDA": (
        "ranks see no GPU where there are some",
        "torch is a CPU build or newer than the driver; CUDA_VISIBLE_DEVICES is empty",
        "compare nvidia-smi with torch.version.cuda; ask for one GPU per rank"),
    "cores": (
        "ranks have less than one CPU core each",
        "the launcher binds them, or the job asked for too few",
        "mpiexec --depth and --cpu-bind, srun --cpus-per-task, Open MPI's --bind-to none"),
    "all-reduce": (
        "ranks meet, but the all-reduce fails",
        "gloo or NCCL takes another network than the meeting, a firewall, a plugin",
        "set GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, best in the site's file; NCCL_DEBUG=INFO"),
    "sum": (
        "the all-reduce gives a wrong sum",
        "a fault of hardware or of a network plugin",
        "try NCCL_P2P_DISABLE=1, NCCL_NET=Socket, other nodes; tell the site's support"),
    "failed": (
        "a rank stops in the examination",
        "the message tells what is known",
        "tell the site's support"),
}
NOTES = {"ordinal"}  # worth knowing, not wrong
try:
    import psutil
    import torch
    import torch.distributed as dist

    for package in "numpy", "tqdm":  # every chapter imports them
        importlib.import_module(package)
    import_problem = None
except (ImportError, OSError, RuntimeError) as problem:
    import_problem = f"{problem}, in {sys.executable}"


# What it says, and how it ends.

def table(faults: "dict[str, str]") -> str:
    """Return a Markdown table of faults, which are given as {key: where and what}."""
    rows = ["| symptom | cause | cure |", "|---|---|---|"]
    for key, detail in faults.items():
        symptom, cause, cure = FAULTS[key]
        detail = " ".join(detail.split()).replace("|", "/")
        rows.append(f"| {symptom}: {detail} | {cause} | {cure} |")
    return "\n".join(rows)


def is_silent():
    """Return True if the launcher's variables say that this is not rank 0, which speaks for all."""
    with suppress(LookupError, ValueError):  # they contradict each other
        return launched()[1] > 0
    return False


def refuse(message):
    """End all ranks with one line about a flag, from rank 0."""
    if is_silent():
        time.sleep(2)  # or the launcher ends rank 0 before it has spoken
    else:
        print(f"doctor.py: {message}", file=sys.stderr)
    sys.exit(2)


def fail(key, detail, hold=1.5):
    """Name a fault that keeps ranks apart, from one rank of the node, and end this process."""
    time.sleep(is_silent())  # rank 0 first
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0doctor {os.getuid()} {os.getppid()}")  # one process of a launcher gets it
        taken = False
    except OSError as problem:
        taken = problem.errno == errno.EADDRINUSE
    if not taken:
        print(table({key: detail}), flush=True)
    time.sleep(hold)  # the others see the lock, and the launcher passes on what was printed
    os._exit(1)


def watch(seconds):
    """Fork a process that ends this one if it stays at one thing for too long.

    A thread would not do: MPI_Init stops all. Return a function that says what comes next, as the
    fault that it is if it does not end. Rank 0 is the first to give up.
    """
    limit = 3 + (2 * seconds if is_silent() else seconds)
    reading, writing = os.pipe()
    warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # the child starts no library
    if os.fork() == 0:
        os.close(writing)
        guard(reading, limit)

    def begin(key, detail):
        os.write(writing, b" " if is_silent() else f"{table({key: detail})}\n".encode())

    return begin


def guard(reading, limit):
    """Kill the parent, and print what it wrote last, if it writes nothing for so long."""
    parent, text = os.getppid(), b""
    while select.select([reading], [], [], limit)[0]:
        text = os.read(reading, 9999)
        if not text:  # it has ended
            os._exit(0)
    os.write(1, text)
    os.kill(parent, signal.SIGKILL)
    os._exit(0)


# How the ranks meet.

def recognise():
    """Let ranks.py find the rank. Return the launcher, or None, and its variables as text."""
    variables = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES
                          if name in os.environ) or "none"
    try:
        launcher, _, _ = launched()
        find_ranks()
        if not os.environ["MASTER_PORT"].isdecimal():
            raise ValueError(f"MASTER_PORT={os.environ['MASTER_PORT']}")
    except SystemExit as exit:
        key = "mpi" if "mpi4py" in str(exit) else "contradiction"
        fail(key, f"{exit} (variables: {variables})", hold=4)
    except (LookupError, ValueError) as problem:
        fail("contradiction", f"{type(problem).__name__} {problem} (variables: {variables})")
    return launcher, variables


def count_twins():
    """Return how many other processes have this command line, and started with this one."""
    me, twins = psutil.Process(), []
    time.sleep(max(0, me.create_time() + 3 - time.time()))  # until a launcher has started all
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            together = process.ppid() == me.ppid() or os.getsid(process.pid) == os.getsid(0)
            same_time = abs(process.create_time() - me.create_time()) < 10
            same_command = process.cmdline() == me.cmdline() and process.uids() == me.uids()
            if together and same_time and same_command:
                twins.append(process)
    pids = {process.pid for process in twins}
    return sum(process.ppid() not in pids for process in twins) - 1  # without guards and this one


def meet(seconds):
    """Return the store at which ranks meet, which works where gloo and NCCL may not."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torchruns_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # is open already
    is_server = rank == 0 and not torchruns_store
    deadline = time.monotonic() + seconds
    while True:
        try:
            if is_server:
                socket.create_server(("", port)).close()
            else:
                socket.create_connection((host, port), 5).close()
            return dist.TCPStore(
                host, port, world_size, is_server, timedelta(seconds=seconds), False)
        except (OSError, OverflowError) as problem:
            here = socket.gethostname()
            if is_server:
                fail("port", f"MASTER_PORT={port} on {here}: {problem}")
            if time.monotonic() > deadline:
                fail("meeting", f"rank {rank} on {here}, {host}:{port}, {seconds:g} s: {problem}")
            time.sleep(0.2)


def agree(store, key, facts, judge, seconds):
    """Let rank 0 judge the facts of all ranks and print the faults: judge([facts of each rank]).

    Return on all ranks whether there are faults. A rank without facts is the fault `key`.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    names = [f"{key} {other}" for other in range(world_size)]
    store.set_timeout(timedelta(seconds=2 * seconds))
    store.set(names[rank], json.dumps(facts))
    if rank == 0:
        deadline = time.monotonic() + seconds
        while not store.check(names) and time.monotonic() < deadline:
            time.sleep(0.05)
        missing = [other for other, name in enumerate(names) if not store.check([name])]
        if missing:
            fail(key, f"nothing from rank {numbers(missing)} in {seconds:g} s")
        faults = judge([json.loads(store.get(name)) for name in names])
        for note in NOTES & faults.keys():
            symptom, cause, cure = FAULTS[note]
            print(f"note: {symptom}, {faults.pop(note)}, {cause}, {cure}")
        if faults:
            print(f"\n{table(faults)}", flush=True)
        store.set(f"{key} verdict", "wrong" if faults else "right")
    return store.get(f"{key} verdict") == b"wrong"


# What each rank sees.

def interfaces():
    """Return this node's network interfaces that have an address, as {name: addresses}."""
    addresses_of = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address.partition("%")[0] for entry in entries
                     if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if addresses:
            addresses_of[name] = addresses
    return addresses_of


def nccl_takes(value, names):
    """Return the interfaces that NCCL_SOCKET_IFNAME leaves of these.

    NAME,... are beginnings, =NAME,... whole names; ^NAME,... and ^=NAME,... are left out.
    """
    words = value.lstrip("^=").split(",")
    if value.startswith(("=", "^=")):
        matching = names & set(words)
    else:
        matching = {name for name in names if name.startswith(tuple(words))}
    return names - matching if value.startswith("^") else matching


def wrong_interface():
    """Return which of the two variables names no interface, or None."""
    names, wrong = interfaces().keys(), []
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "")
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if gloo and not set(gloo.split(",")) <= names:
        wrong.append(f"GLOO_SOCKET_IFNAME={gloo}")
    if nccl and not nccl_takes(nccl, names):
        wrong.append(f"NCCL_SOCKET_IFNAME={nccl}")
    if wrong:
        return f"{', '.join(wrong)}; {socket.gethostname()} has {', '.join(names)}"
    return None


def gloo_takes():
    """Return the interface and the address that gloo connects from."""
    addresses_of = interfaces()
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        return name, addresses_of.get(name, ["no address"])[0]
    with suppress(OSError):
        for family, *_, (address, *_) in socket.getaddrinfo(
                socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family) as test:
                test.bind((address, 0))  # as gloo does: is this address one of this node's?
                names = [name for name, own in addresses_of.items() if address in own]
                return (*names, "lo")[0], address
    return "lo", "127.0.0.1"


def examine():
    """Return what this rank sees of itself, or {"failed": why}."""
    try:
        local_rank = int(os.environ["LOCAL_RANK"])
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(gpus)]
        cores = range(os.cpu_count())
        if hasattr(os, "sched_getaffinity"):  # not on macOS
            cores = os.sched_getaffinity(0)
        return {"node": socket.gethostname(), "local_rank": local_rank, "uuids": uuids,
                "takes": uuids[local_rank % gpus] if gpus else None,
                "cores": sorted(cores), "all_cores": os.cpu_count(),
                "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
                "driver": os.path.exists("/dev/nvidia0"), "interface": wrong_interface(),
                "gloo": gloo_takes(), "nccl": os.environ.get("NCCL_SOCKET_IFNAME", "not set")}
    except Exception as problem:  # of a driver, for instance
        return {"failed": f"{type(problem).__name__}: {problem}"}


# What rank 0 makes of it.

def numbers(values):
    """Return whole numbers in short: 0-3,7."""
    texts = []
    for _, run in groupby(enumerate(sorted(values)), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in run]
        texts.append(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]))
    return ",".join(texts)


def first_of(ranks, *keys):
    """Return, for each key that a rank has a fault under, the first such rank and its text."""
    faults = {}
    for key in keys:
        for rank, facts in enumerate(ranks):
            if facts.get(key):
                faults.setdefault(key, f"rank {rank}: {facts[key]}")
    return faults


def show(ranks, nodes):
    """Print what is installed, and the facts node by node and rank by rank."""
    versions = {package.name.lower(): package.version for package in distributions()}
    mpi = sys.modules.get("mpi4py.MPI")
    library = re.split("[\n,]", mpi.Get_library_version())[0] if mpi else "no MPI"
    print(f"versions: Python {sys.version.split()[0]}, torch {torch.__version__}, "
          f"{' '.join(library.split())} loaded, "
          f"Horovod {versions.get('horovod', 'not installed')}, "
          f"DeepSpeed {versions.get('deepspeed', 'not installed')}")
    print(f"ranks: {len(ranks)}, nodes: {len(nodes)}")
    for node, here in nodes.items():
        interface, address = here[0]["gloo"]
        print(f"node {node}: local ranks {numbers(facts['local_rank'] for facts in here)}, "
              f"gloo takes {interface} ({address}), NCCL_SOCKET_IFNAME: {here[0]['nccl']}")
    for rank, facts in enumerate(ranks):
        print(f"rank {rank}: {facts['node']}, local rank {facts['local_rank']}, "
              f"CPU cores: {numbers(facts['cores'])}, GPUs: {len(facts['uuids'])} "
              f"(CUDA_VISIBLE_DEVICES: {facts['visible']}), takes: {facts['takes'] or 'none'}")


def diagnose(ranks):
    """Show the facts of all ranks. Return what is wrong, as {key of FAULTS: where and what}."""
    faults, nodes = first_of(ranks, "failed", "interface"), {}
    if "failed" in faults:
        return faults
    for facts in ranks:
        nodes.setdefault(facts["node"], []).append(facts)
    show(ranks, nodes)
    any_gpu = any(facts["takes"] for facts in ranks)
    for node, here in nodes.items():
        faults |= diagnose_gpus(node, here, any_gpu)
        cores = {core for facts in here for core in facts["cores"]}
        all_cores = here[0]["all_cores"]
        if len(cores) < min(len(here), all_cores):
            faults["cores"] = f"{node}, {len(here)} ranks on core {numbers(cores)} of {all_cores}"
        _, address = here[0]["gloo"]
        if len(nodes) > 1 and address.startswith(("127.", "::1")):
            faults["loopback"] = f"{node}, {address}"
    return faults


def diagnose_gpus(node, here, any_gpu):
    """Return what is wrong with the GPUs of one node's ranks."""
    uuids = {uuid for facts in here for uuid in facts["uuids"]}
    gpus = max(len(uuids), *(len(facts["uuids"]) for facts in here))
    takes = [facts["takes"] for facts in here]
    if None in takes and (here[0]["driver"] or any_gpu):
        blind = here[takes.index(None)]
        return {"no CUDA": f"{node}, CUDA_VISIBLE_DEVICES {blind['visible']}"}
    if gpus and len(here) > gpus:
        return {"too many ranks": f"{node}, {len(here)} ranks, {gpus} GPUs"}
    if gpus and len(set(takes)) < len(takes):
        local_ranks = numbers(facts["local_rank"] for facts in here)
        return {"one GPU": f"{node}, local ranks {local_ranks}"}
    if gpus and any(facts["local_rank"] >= len(facts["uuids"]) for facts in here):
        return {"ordinal": f"{node}, ranks see {len(here[0]['uuids'])} of {gpus} GPUs"}
    return {}


# The all-reduce.

def measure(size, device):
    """Return the median seconds of all-reduces of so many bytes, and whether all sums are right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.empty(size // 4, device=device)
    times, right = [], True
    for _ in range(6):
        tensor.fill_(rank + 1)
        tensor[0].item()  # the GPU has nothing left to do
        started = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()
        times.append(time.perf_counter() - started)
        right = right and bool((tensor == world_size * (world_size + 1) / 2).all())
    return statistics.median(times[1:]), right  # the first one connects


def all_reduce(store, seconds):
    """Time and check all-reduces over the chapters' backends. Return the faults, for agree()."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    libraries, backends, faults = {"cpu": "gloo"}, "gloo", {}
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            libraries["cuda"], backends = "NCCL", "cpu:gloo,cuda:nccl"
        dist.init_process_group(backends, timeout=timedelta(seconds=seconds / 2), store=store,
                                rank=rank, world_size=world_size)
        for device, library in libraries.items():
            for name, size in list(SIZES.items())[:3 if device == "cpu" else 4]:
                median, right = measure(size, device)
                if not right:
                    faults["sum"] = f"{name} over {library}"
                bandwidth = 2 * (world_size - 1) / world_size * size / median / 1e9
                if rank == 0:
                    print(f"all-reduce over {library}, {name}: {median:.6f} s, "
                          f"bus bandwidth {bandwidth:.3f} GB/s")
    except Exception as problem:
        text = " ".join(str(problem).split())
        faults["all-reduce"] = f"{type(problem).__name__}: {text:.200}"
    return faults


def examine_together(begin, launcher, variables, seconds):
    """Return whether something is wrong, which rank 0 has printed."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    begin("meeting", f"{place} does not answer as PyTorch would")
    store = meet(seconds)
    if os.environ["RANK"] == "0":
        print(f"launcher: {LAUNCHERS.get(launcher, 'none')}; variables: {variables}")
    here = socket.gethostname()
    begin("failed", f"looking at the GPUs of {here} takes more than {seconds:g} s")
    facts = examine()
    begin("meeting", f"the ranks exchange nothing in {seconds:g} s")
    if agree(store, "meeting", facts, diagnose, seconds):
        return True
    begin("all-reduce", f"no end after {seconds:g} s")
    faults = all_reduce(store, seconds)
    begin("all-reduce", f"the ranks exchange nothing more in {seconds:g} s")
    return agree(store, "all-reduce", faults,
                 lambda ranks: first_of(ranks, "all-reduce", "sum"), seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--timeout", type=float, default=60,
                        help="seconds that ranks wait for each other (60)")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed's launcher passes it
    seconds = parser.parse_args().timeout
    if not 0 < seconds < math.inf:
        refuse(f"--timeout {seconds}: wait for some seconds")
    if import_problem:
        fail("import", import_problem)

    begin = watch(seconds)
    begin("mpi meeting", f"{socket.gethostname()}, {seconds:g} s")
    launcher, variables = recognise()
    twins = 0 if launcher else count_twins()
    if twins:  # those that start late count this process
        fail("launcher", f"{twins + 1} processes on {socket.gethostname()}", hold=10)
    try:
        wrong = examine_together(begin, launcher, variables, seconds)
    except Exception as problem:
        if os.environ["RANK"] == "0":
            fail("failed", f"{type(problem).__name__}: {problem}")
        wrong = True  # rank 0 misses this rank, or is gone itself
    if wrong:
        time.sleep(1)  # what rank 0 printed comes first
        signal.alarm(3)  # MPI_Finalize waits for ranks that are gone
    else:
        dist.barrier()  # nobody leaves while others still talk
        if os.environ["RANK"] == "0":
            print("nothing wrong was found")
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(wrong)


if __name__ == "__main__":
    main()
