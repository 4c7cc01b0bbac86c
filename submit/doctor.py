"""Find what keeps ranks from training together.

Run it first on a compute node, started exactly as a chapter is:

    mpiexec -n 4 python submit/doctor.py            # or srun, or torchrun; python alone is one rank

It changes nothing. What it finds is a line of a table, symptom, cause and cure, and exit code 1; else it says that
nothing wrong was found. It ends by itself: where ranks wait for each other longer than --timeout, it has found that.
"""

import argparse
import errno
import importlib.util
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import distributions
from itertools import groupby
from pathlib import Path

if __name__ == "__main__":  # before torch is imported; whoever imports this file keeps its own environment
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings would stand between the lines
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # watch() ends what hangs: a line, no backtrace
RANKS = Path(__file__).resolve().parent.parent / "01_single_node" / "ranks.py"  # what finds the ranks in every chapter
spec = importlib.util.spec_from_file_location("ranks_py", RANKS)
ranks_py = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ranks_py)
NAMES = {"horovodrun": "horovodrun", "Open MPI": "mpiexec of Open MPI", "MVAPICH": "mpiexec of MVAPICH2",
         "MPICH": "mpiexec of MPICH or Cray PALS, or srun --mpi=pmi2",
         "torchrun": "torchrun, or who set its five variables", "srun": "srun without MPI"}
VARIABLES = [(ranks_py.LAUNCHERS | {"torchrun": ranks_py.TORCHRUN[:2]})[name] for name in NAMES]  # rank's, and size's
FAULTS = {  # key: (symptom, cause, cure)
    "import": ("a package does not load", "this is not the Python of the workshop's environment, or modules are "
               "not loaded", "load the site's modules, activate the environment"),
    "contradiction": ("variables contradict each other", "the batch script itself runs Python, without srun or "
                      "mpiexec; or a variable is left from another job", "start with srun or mpiexec; unset it"),
    "mpi": ("mpiexec and mpi4py are of different MPIs", "another mpiexec comes first on PATH, or mpi4py was built with "
            "another MPI", "take the mpiexec beside python, or build mpi4py with the site's MPI"),
    "launcher": ("each process takes itself for rank 0 of 1 and trains alone", "the launcher's variables are unknown "
                 "here", "start with mpiexec, srun or torchrun"),
    "port": ("MASTER_PORT cannot be opened", "another program on rank 0's node holds it, often a job that did not end",
             "unset MASTER_PORT, or choose a free one"),
    "meeting": ("ranks do not meet", "a firewall between nodes; a MASTER_ADDR that a node does not know; ranks that "
                "start late or never", "an address of the cluster's network as MASTER_ADDR; a greater --timeout"),
    "mpi meeting": ("MPI does not start", "its ranks do not reach each other, or some did not start",
                    "try mpiexec -n 2 hostname, then the site's MPI example with the site's network variables"),
    "interface": ("GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface with an address", "mistyped, or another "
                  "node's; gloo wants whole names, NCCL beginnings", "take one of those listed, or unset it"),
    "loopback": ("gloo takes an address that other nodes cannot reach", "the hostname resolves to 127.x, mostly in "
                 "/etc/hosts", "set GLOO_SOCKET_IFNAME, best in the site's file, to an "
                 "interface of the cluster's network (`ip address`)"),
    "too many ranks": ("more ranks on a node than GPUs that they see", "too many were started, or CUDA_VISIBLE_DEVICES "
                       "hides GPUs", "a rank a GPU: mpiexec --ppn, srun --ntasks-per-node, torchrun --nproc-per-node"),
    "one GPU": ("several ranks have the same GPU", "their local ranks or their CUDA_VISIBLE_DEVICES are the same",
                "unset CUDA_VISIBLE_DEVICES, or give each rank its own; start a node's ranks by one launcher"),
    "ordinal": ("`invalid device ordinal` in code that takes `cuda:LOCAL_RANK`", "each rank sees only its own GPU, as "
                "index 0", "nothing to do: the chapters take index 0, and tell DeepSpeed so"),
    "no CUDA": ("ranks see no GPU where there are some", "torch is a CPU build or newer than the driver; "
                "CUDA_VISIBLE_DEVICES is empty", "compare nvidia-smi with torch.version.cuda; ask for a GPU a rank"),
    "cores": ("ranks have less than a CPU core each", "the launcher binds them, or the job asked for too few",
              "mpiexec --depth and --cpu-bind, srun --cpus-per-task, Open MPI's --bind-to none"),
    "all-reduce": ("ranks meet, but the all-reduce fails", "gloo or NCCL takes another network than the meeting, "
                   "a firewall, a plugin", "set GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, best in the "
                   "site's file; look with NCCL_DEBUG=INFO"),
    "sum": ("the all-reduce gives a wrong sum", "a fault of hardware or of a network plugin",
            "try NCCL_P2P_DISABLE=1, NCCL_NET=Socket, other nodes; tell the site's support"),
    "failed": ("a rank stops in the examination", "the message tells what is known", "tell the site's support"),
}
NOTES = {"ordinal"}  # worth knowing, not wrong
WATCH = """
import os, select, signal, sys
while select.select([0], [], [], float(sys.argv[1]))[0]:
    text = os.read(0, 9999)
    if not text:
        sys.exit()
os.write(1, text)
os.kill(os.getppid(), signal.SIGKILL)
"""
try:
    import psutil
    import torch
    import torch.distributed as dist

    for package in "numpy", "tqdm":  # every chapter imports them
        importlib.import_module(package)
    absent = None
except (ImportError, OSError, RuntimeError) as problem:
    absent = f"{problem}, in {sys.executable}"


def table(found: "dict[str, str]") -> str:
    """The text of a Markdown table of the faults that were found, given as {key: where and what}."""
    rows = ["| symptom | cause | cure |", "|---|---|---|"]
    for key, detail in found.items():
        symptom, cause, cure = FAULTS[key]
        detail = " ".join(detail.split()).replace("|", "/")
        rows.append(f"| {symptom}: {detail} | {cause} | {cure} |")
    return "\n".join(rows)


def silent():
    """Whether this is not rank 0, as far as the launcher's variables tell: rank 0 speaks for all."""
    return next((os.environ[rank] for rank, _ in VARIABLES if rank in os.environ), "0") != "0"


def refuse(message):
    """End all ranks with one line about a flag, from rank 0."""
    if silent():
        time.sleep(2)  # or the launcher ends rank 0 before it has spoken
    else:
        print(f"doctor.py: {message}", file=sys.stderr)
    sys.exit(2)


def fail(key, detail, hold=1.5):
    """Name a fault that keeps ranks apart, from rank 0 or else from one rank of the node, and end this process."""
    time.sleep(silent())
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0doctor {os.getuid()} {os.getppid()}")  # the first that a launcher started on this node gets it
        taken = False
    except OSError as problem:
        taken = problem.errno == errno.EADDRINUSE
    if not taken:
        print(table({key: detail}), flush=True)
    time.sleep(hold)  # the others see that it is taken, and the launcher passes on what was said
    os._exit(1)


def watch(seconds):
    """Start a process that ends this one if it stays at one thing for too long: MPI_Init would stop any thread.

    Returns a function to say what is next, as the fault that it is if it does not end; rank 0 is the first to give up.
    """
    limit = 3 + (2 * seconds if silent() else seconds)
    watcher = subprocess.Popen([sys.executable, "-IS", "-c", WATCH, str(limit)], stdin=subprocess.PIPE)
    return lambda key, detail: os.write(
        watcher.stdin.fileno(), b" " if silent() else f"{table({key: detail})}\n".encode())


def recognise():
    """Let ranks.py find the rank. Returns the launcher's name in NAMES (None: nobody) and its variables as text."""
    names = [*(name for pair in VARIABLES for name in pair), "SLURM_NTASKS"]
    variables = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "none"
    try:
        launcher, _, _ = ranks_py.launched()
        ranks_py.find_ranks()
        if not os.environ["MASTER_PORT"].isdecimal():
            raise ValueError(f"MASTER_PORT={os.environ['MASTER_PORT']}")
    except SystemExit as end:
        fail("mpi" if "mpi4py" in str(end) else "contradiction", f"{end} (variables: {variables})", hold=4)
    except (LookupError, ValueError) as problem:
        fail("contradiction", f"{type(problem).__name__} {problem} (variables: {variables})")
    return launcher, variables


def others():
    """How many processes have this one's command line and were started with it: by one parent, or in one session."""
    me, found = psutil.Process(), 0
    time.sleep(max(0, me.create_time() + 3 - time.time()))  # until a launcher has started all
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            found += (process.pid != me.pid and process.cmdline() == me.cmdline() and process.uids() == me.uids()
                      and abs(process.create_time() - me.create_time()) < 10
                      and (process.ppid() == me.ppid() or os.getsid(process.pid) == os.getsid(0)))
    return found


def meet(seconds):
    """The store at which the ranks meet; it works where gloo's or NCCL's own connections may not."""
    host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun has opened its own
    end = time.monotonic() + seconds
    while True:
        try:
            (socket.create_server(("", port)) if server else socket.create_connection((host, port), 5)).close()
            break
        except (OSError, OverflowError) as problem:
            if server:
                fail("port", f"MASTER_PORT={port} on {socket.gethostname()}: {problem}")
            if time.monotonic() > end:
                fail("meeting", f"rank {rank} on {socket.gethostname()}, {host}:{port}, {seconds:g} s: {problem}")
            time.sleep(0.2)
    return dist.TCPStore(host, port, int(os.environ["WORLD_SIZE"]), server, timedelta(seconds=seconds), False)


def agree(store, key, mine, judge, seconds):
    """Hand what this rank found to rank 0, which says what judge([of each rank]) returns, {fault: where and what}.

    Returns, on all ranks, whether something is wrong. A rank that hands in nothing is the fault `key`, and the end.
    """
    rank, names = int(os.environ["RANK"]), [f"{key} {rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    store.set_timeout(timedelta(seconds=2 * seconds))
    store.set(names[rank], json.dumps(mine))
    if rank == 0:
        end = time.monotonic() + seconds
        while not store.check(names) and time.monotonic() < end:
            time.sleep(0.05)
        missing = [rank for rank, name in enumerate(names) if not store.check([name])]
        if missing:
            fail(key, f"nothing from rank {numbers(missing)} in {seconds:g} s")
        found = judge([json.loads(store.get(name)) for name in names])
        for note in NOTES & found.keys():
            print(f"note: {': '.join((FAULTS[note][0], found.pop(note), *FAULTS[note][1:]))}")
        if found:
            print(f"\n{table(found)}", flush=True)
        store.set(f"{key} verdict", "wrong" if found else "right")
    return store.get(f"{key} verdict") == b"wrong"


def interfaces():
    """This node's network interfaces that have an address, as {name: addresses}."""
    found = {name: [address.address.partition("%")[0] for address in addresses
                    if address.family in (socket.AF_INET, socket.AF_INET6)]
             for name, addresses in psutil.net_if_addrs().items()}
    return {name: addresses for name, addresses in found.items() if addresses}


def nccl_takes(value, known):
    """Which interfaces NCCL_SOCKET_IFNAME leaves: NAME,... are beginnings, =NAME,... whole names, ^... is left out."""
    names = value.lstrip("^=").split(",")
    if value.startswith(("=", "^=")):
        named = known.keys() & set(names)
    else:
        named = {name for name in known if name.startswith(tuple(names))}
    return known.keys() - named if value.startswith("^") else named


def wrong_interface():
    """Which of the two variables names no interface, or None."""
    known, wrong = interfaces(), []
    gloo, nccl = (os.environ.get(f"{name}_SOCKET_IFNAME", "") for name in ("GLOO", "NCCL"))
    if gloo and not set(gloo.split(",")) <= known.keys():
        wrong.append(f"GLOO_SOCKET_IFNAME={gloo}")
    if nccl and not nccl_takes(nccl, known):
        wrong.append(f"NCCL_SOCKET_IFNAME={nccl}")
    return f"{', '.join(wrong)}; {socket.gethostname()} has {', '.join(known)}" if wrong else None


def gloo_takes():
    """The interface and the address that gloo connects from."""
    known, name = interfaces(), os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        return name, known.get(name, ["no address"])[0]
    with suppress(OSError):
        for family, *_, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family) as test:
                test.bind((place[0], 0))  # as gloo does: is this address one of this node's?
                return next((name for name, addresses in known.items() if place[0] in addresses), "lo"), place[0]
    return "lo", "127.0.0.1"


def examine():
    """What this rank finds out about itself, as a dict for agree()."""
    try:
        gpus, local_rank = torch.cuda.device_count() if torch.cuda.is_available() else 0, int(os.environ["LOCAL_RANK"])
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(gpus)]
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())  # not on macOS
        return {"node": socket.gethostname(), "local_rank": local_rank, "uuids": uuids, "cores": sorted(cores),
                "takes": uuids[local_rank % gpus] if gpus else None, "all_cores": os.cpu_count(),
                "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"), "driver": os.path.exists("/dev/nvidia0"),
                "interface": wrong_interface(), "gloo": gloo_takes(),
                "nccl": os.environ.get("NCCL_SOCKET_IFNAME", "not set")}
    except Exception as problem:  # a driver's error, too, is named by rank 0
        return {"failed": f"{type(problem).__name__}: {problem}"}


def numbers(found):
    """Whole numbers in short: 0-3,7."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(sorted(found)), lambda at: at[1] - at[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)


def first_of(ranks, *keys):
    """What ranks say under these keys, as {key: what the first of them says}."""
    found = {}
    for key in keys:
        said = [f"rank {rank}: {own[key]}" for rank, own in enumerate(ranks) if own.get(key)]
        if said:
            found[key] = said[0]
    return found


def show(ranks, nodes):
    """Print what is installed, and what the ranks found out about themselves, node by node and rank by rank."""
    versions, mpi = {each.name.lower(): each.version for each in distributions()}, sys.modules.get("mpi4py.MPI")
    library = re.split("[\n,]", mpi.Get_library_version())[0] if mpi else "no MPI"
    print(f"versions: Python {sys.version.split()[0]}, torch {torch.__version__}, {' '.join(library.split())} loaded, "
          + ", ".join(f"{name} {versions.get(name.lower(), 'not installed')}" for name in ("Horovod", "DeepSpeed")))
    print(f"ranks: {len(ranks)}, nodes: {len(nodes)}")
    for node, here in nodes.items():
        print(f"node {node}: local ranks {numbers(own['local_rank'] for own in here)}, gloo takes {here[0]['gloo'][0]} "
              f"({here[0]['gloo'][1]}), NCCL_SOCKET_IFNAME: {here[0]['nccl']}")
    for rank, own in enumerate(ranks):
        print(f"rank {rank}: {own['node']}, local rank {own['local_rank']}, CPU cores: {numbers(own['cores'])}, "
              f"GPUs: {len(own['uuids'])} (CUDA_VISIBLE_DEVICES: {own['visible']}), takes: {own['takes'] or 'none'}")


def diagnose(ranks):
    """Show what the ranks found out about themselves. Returns what is wrong, as {key of FAULTS: where and what}."""
    found, nodes = first_of(ranks, "failed", "interface"), {}
    if "failed" in found:
        return found
    for own in ranks:
        nodes.setdefault(own["node"], []).append(own)
    show(ranks, nodes)
    for node, here in nodes.items():
        gpus = max(len({uuid for own in here for uuid in own["uuids"]}), *(len(own["uuids"]) for own in here))
        takes = [own["takes"] for own in here]
        cores = {core for own in here for core in own["cores"]}
        if None in takes and (here[0]["driver"] or any(own["takes"] for own in ranks)):
            found["no CUDA"] = f"{node}, CUDA_VISIBLE_DEVICES {here[takes.index(None)]['visible']}"
        elif gpus and len(here) > gpus:
            found["too many ranks"] = f"{node}, {len(here)} ranks, {gpus} GPUs"
        elif gpus and len(set(takes)) < len(takes):
            found["one GPU"] = f"{node}, local ranks {numbers(own['local_rank'] for own in here)}"
        elif gpus and any(own["local_rank"] >= len(own["uuids"]) for own in here):
            found["ordinal"] = f"{node}, ranks see {len(here[0]['uuids'])} of {gpus} GPUs"
        if len(cores) < min(len(here), here[0]["all_cores"]):
            found["cores"] = f"{node}, {len(here)} ranks on core {numbers(cores)} of {here[0]['all_cores']}"
        if len(nodes) > 1 and here[0]["gloo"][1].startswith(("127.", "::1")):
            found["loopback"] = f"{node}, {here[0]['gloo'][1]}"
    return found


def measure(size, device):
    """Median seconds of some all-reduces of so many bytes, and whether each gave the right sum on this rank."""
    rank, ranks, times, right = dist.get_rank(), dist.get_world_size(), [], True
    tensor = torch.empty(size // 4, device=device)
    for _ in range(6):
        tensor.fill_(rank + 1)
        tensor[0].item()  # the GPU has nothing left to do
        started = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()
        times.append(time.perf_counter() - started)
        right = right and bool((tensor == ranks * (ranks + 1) / 2).all())  # the others go on, and this rank with them
    return statistics.median(times[1:]), right  # the first connects


def all_reduce(store, seconds):
    """Time and check all-reduces over the chapters' backends; rank 0 prints. Returns {fault: what}, for agree()."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    libraries, backends, found = {"cpu": "gloo"}, "gloo", {}
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            libraries, backends = {"cpu": "gloo", "cuda": "NCCL"}, "cpu:gloo,cuda:nccl"
        dist.init_process_group(backends, timeout=timedelta(seconds=seconds / 2), store=store, rank=rank,
                                world_size=ranks)
        for device, library in libraries.items():
            sizes = {"4 kB": 2 ** 12, "1 MB": 2 ** 20, "16 MB": 2 ** 24, "256 MB": 2 ** 28}
            for name, size in list(sizes.items())[:3 if device == "cpu" else 4]:
                median, right = measure(size, device)
                if not right:
                    found["sum"] = f"{name} over {library}"
                if rank == 0:
                    print(f"all-reduce over {library}, {name}: {median:.6f} s, bus bandwidth "
                          f"{2 * (ranks - 1) / ranks * size / median / 1e9:.3f} GB/s")
    except Exception as problem:
        found["all-reduce"] = f"{type(problem).__name__}: {' '.join(str(problem).split()):.200}"
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--timeout", type=float, default=60, help="seconds that ranks wait for each other (60)")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the launcher deepspeed gives it
    seconds = parser.parse_args().timeout
    if not 0 < seconds < math.inf:
        refuse(f"--timeout {seconds}: wait for some seconds")
    if absent:
        fail("import", absent)
    begin = watch(seconds)
    begin("mpi meeting", f"{socket.gethostname()}, {seconds:g} s")
    launcher, variables = recognise()
    twins = 0 if launcher else others()
    if twins:
        fail("launcher", f"{twins + 1} processes on {socket.gethostname()}", hold=10)  # those that start late count it
    begin("meeting", "{MASTER_ADDR}:{MASTER_PORT} does not answer as PyTorch would".format_map(os.environ))
    try:
        store = meet(seconds)
        if os.environ["RANK"] == "0":
            print(f"launcher: {NAMES.get(launcher, 'none')}; variables: {variables}")
        begin("failed", f"looking at the GPUs of {socket.gethostname()} takes more than {seconds:g} s")
        own = examine()
        begin("meeting", f"the ranks exchange nothing in {seconds:g} s")
        wrong = agree(store, "meeting", own, diagnose, seconds)
        if not wrong:
            begin("all-reduce", f"no end after {seconds:g} s")
            own = all_reduce(store, seconds)
            begin("all-reduce", f"the ranks exchange nothing more in {seconds:g} s")
            wrong = agree(store, "all-reduce", own, lambda ranks: first_of(ranks, "all-reduce", "sum"), seconds)
    except Exception as problem:
        if os.environ["RANK"] == "0":
            fail("failed", f"{type(problem).__name__}: {problem}")
        wrong = True  # rank 0 misses this rank, or is gone itself
    if wrong:
        time.sleep(1)  # what rank 0 said comes first
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
