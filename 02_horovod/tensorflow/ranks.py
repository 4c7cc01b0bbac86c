"""Find this process's rank, whether mpiexec, srun, torchrun, deepspeed or python started it.

    rank, world_size, local_rank = find_ranks()
    torch.distributed.init_process_group()  # reads the variables that find_ranks() has set

Every chapter has the same file. Copy it into your own project; under mpiexec it needs mpi4py.
"""

import os
import random
import re
import signal
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # deepspeed, too
LAUNCHERS = {  # variables for rank, world size and local rank; None: no variable is read
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", None),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", None),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", None),
    "MPICH": ("PMI_RANK", "PMI_SIZE", None),  # also Cray MPICH, Intel MPI, and srun --mpi=pmi2
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    "PALS": ("PALS_RANKID", None, None),  # with --pmi=pmix: no variable for the world size
    "PMIx": ("PMIX_RANK", None, None),
}
MPIEXECS, WITHOUT_MPI = ("Open MPI", "MVAPICH", "MPICH"), ("srun", "Flux", "jsrun")
JOB_IDS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "FLUX_JOB_ID", "LSB_JOBID")
stores = []  # keeps find_local_rank()'s store alive, because init_process_group() uses it, too


def read_number(name: str) -> int:
    """Return an environment variable as a number; exit if it is not one."""
    text = os.environ[name]
    if not text.isdecimal():
        raise CollectiveExit(f"{name}={text} is not a number: unset it, or start this program with "
                             "mpiexec, srun or torchrun")
    return int(text)


def own_rank() -> int:
    """Return the first valid variable's rank, or 0. Never raises: it decides who prints errors."""
    for name in [*(rank_name for rank_name, _, _ in LAUNCHERS.values()), "RANK"]:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


def find_launcher() -> "tuple[str | None, int, int]":
    """Return launcher, rank and world size (0: unknown); without a launcher None, 0 and 1."""
    env = os.environ
    started = [name for name, (rank, size, _) in LAUNCHERS.items() if (size or rank) in env]
    launcher, rank, world_size = None, 0, 1
    if started:
        launcher = started[0]
        rank_name, size_name, _ = LAUNCHERS[launcher]
        rank = read_number(rank_name)
        world_size = read_number(size_name) if size_name else 0
    # A RANK alone, or with a WORLD_SIZE below the launcher's, is left over from another job. So is
    # any without torchrun under mpiexec; under srun a script may have set RANK=$SLURM_PROCID.
    complete = set(TORCHRUN) - {"LOCAL_RANK"} <= env.keys()
    is_current = "TORCHELASTIC_RUN_ID" in env or launcher in (None, "srun")
    if complete and is_current and read_number("WORLD_SIZE") >= world_size:
        return "torchrun", read_number("RANK"), read_number("WORLD_SIZE")
    return launcher, rank, world_size


def find_ranks() -> tuple[int, int, int]:
    """Return rank, world size and local rank; set the variables that torch.distributed reads.

    MASTER_ADDR and MASTER_PORT stay as they are if set. If the variables contradict each other, all
    ranks exit with a one-line message.
    """
    if "torch" in sys.modules:
        # Else torch.optim imports it later: its default arguments would keep the group alive.
        import torch.distributed.nn  # noqa: F401
    env = os.environ
    launcher, rank, world_size = find_launcher()
    if launcher == "torchrun":
        if "GROUP_WORLD_SIZE" in env:  # mpiexec -n 2 torchrun without --nnodes would train twice
            size_names = [size_name for _, size_name, _ in LAUNCHERS.values() if size_name]
            launched = [name for name in size_names if env.get(name, "1") != "1"]
            refuse_other_sizes(launched, int(env["GROUP_WORLD_SIZE"]), "torchrun(s)")
        if "LOCAL_RANK" not in env:  # as in Kubernetes' PyTorchJob
            env["LOCAL_RANK"] = str(find_local_rank(rank, world_size))
        return rank, world_size, read_number("LOCAL_RANK")
    if not world_size:
        raise CollectiveExit(
            f"{LAUNCHERS[launcher][0]} is set, but no variable contains the number of ranks: start "
            "this with mpiexec --pmi=cray, srun --mpi=pmi2, your mpi4py's mpiexec, or torchrun")
    # Refuse two or more ranks of horovodrun: only hvd.init() connects them.
    check_world_size(1 if launcher == "horovodrun" else world_size)
    if launcher in MPIEXECS:
        local_rank, host, port = rendezvous_by_mpi(launcher, world_size)
    elif launcher in WITHOUT_MPI:  # all ranks read one address and port from the job's variables
        local_rank = read_number(LAUNCHERS[launcher][2])
        nodes = env.get("SLURM_STEP_NODELIST", "")
        host = re.sub(r"\[(\d+).*|,.*", r"\1", nodes)  # nid003, the first of nid[003-4,7]
        if not host and "MASTER_ADDR" not in env:
            raise CollectiveExit(f"{launcher} does not name the node of rank 0: set MASTER_ADDR")
        ids = " ".join(env.get(name, "") for name in JOB_IDS)
        port = 20000 + zlib.crc32(ids.encode()) % 10000  # each srun of a job has its own
    else:
        local_rank, host, port = 0, "127.0.0.1", free_port()
    host, port = env.get("MASTER_ADDR", host), env.get("MASTER_PORT", port)
    env.update(zip(TORCHRUN, map(str, (rank, world_size, local_rank, host, port))))
    return rank, world_size, local_rank


def find_local_rank(rank, world_size):
    """Return how many lower ranks are on this node; every rank writes its host to one store."""
    from torch.distributed import TCPStore
    address, port = os.environ["MASTER_ADDR"], read_number("MASTER_PORT")
    store = TCPStore(address, port, world_size, rank == 0, multi_tenant=True)
    stores.append(store)
    store.set(f"host of {rank}", socket.gethostname())
    hosts = [store.get(f"host of {other}").decode() for other in range(rank)]
    return hosts.count(socket.gethostname())


def rendezvous_by_mpi(launcher, world_size):
    """Return the local rank, rank 0's host and a free port there; rank 0 broadcasts both."""
    try:
        import mpi4py
        mpi4py.rc.initialize = False  # else a mismatched MPI aborts before the check below
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:
        sys.exit("cannot import mpi4py: it must be built against the same MPI as mpiexec: "
                 f"{problem}")
    if (launcher == "Open MPI") != ("Open MPI" in MPI.Get_library_version()):
        sys.exit(f"mpiexec comes from {launcher}, but mpi4py is linked against another MPI: use "
                 "the mpiexec next to python")
    program_uses_mpi = MPI.Is_initialized()  # then the program itself finalizes it
    if not program_uses_mpi:
        MPI.Init()
    refuse_other_sizes([LAUNCHERS[launcher][1]], MPI.COMM_WORLD.size)
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks on this node
    local_rank = node.rank
    host = "127.0.0.1" if node.size == world_size else socket.gethostname()
    host, port = MPI.COMM_WORLD.bcast((host, free_port()))
    if not program_uses_mpi:
        MPI.Finalize()
    return local_rank, host, port


def free_port():
    """Return a free port of this node, below the range that the system uses for connections."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)  # independent of --seed
        with suppress(OSError), socket.create_server(("", port)):
            return port


def check_world_size(world_size: int, one_process: bool = False) -> None:
    """Exit if the environment names another number of ranks: each rank would train alone.

    find_ranks() calls this function; with Horovod, call it after hvd.init(). one_process: the
    program is meant to run as one process, even in a batch job of several tasks.
    """
    launcher, _, _ = find_launcher()
    if not launcher and "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise CollectiveExit("RANK is set without WORLD_SIZE, MASTER_ADDR and MASTER_PORT: set "
                             "these, too, or unset RANK if it is left over from another job")
    names = ["WORLD_SIZE"]
    if launcher in LAUNCHERS:
        names += filter(None, LAUNCHERS[launcher][1:2])
    elif not launcher and not one_process:
        names.append("SLURM_NTASKS")
    refuse_other_sizes(names, world_size)


def refuse_other_sizes(names, size, unit="rank(s)"):
    for name in names:
        if int(os.environ.get(name, size)) != size:
            raise CollectiveExit(
                f"{name}={os.environ[name]}, but this program sees {size} {unit}: "
                f"start it as its README says, or unset {name} if it is left over from another job")


def gather(value: object) -> list:
    """Return the values of all ranks, in rank order, on every rank. The ranks must be connected."""
    hvd = sys.modules.get("horovod.torch") or sys.modules.get("horovod.tensorflow")
    if hvd:
        # A name that is equal on all ranks; the default is the value's type.
        return hvd.allgather_object(value, name="values")
    import torch.distributed as dist
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_gpu(local_rank: int, kind: str | None = "cuda") -> int | None:
    """Return the index of this rank's GPU, or None if ranks would have to share one.

    NCCL refuses two ranks on one GPU. All ranks have to call this function, to compare their GPUs:
    after hvd.init(), or after init_process_group("cpu:gloo,cuda:nccl").
    """
    import torch
    index = uuid = None
    if kind and torch.get_device_module(kind).is_available():
        gpus = torch.get_device_module(kind)
        index = local_rank % gpus.device_count()  # %: 0 if each rank sees only its own GPU
        uuid = str(gpus.get_device_properties(index).uuid)
    uuids = gather(uuid)
    all_different = None not in uuids and len(set(uuids)) == len(uuids)
    return index if all_different else None


def init_ranks() -> tuple:
    """Connect all ranks under any launcher; return rank, world size and this rank's device.

    Collectives use gloo for CPU tensors, NCCL for GPU tensors, and XCCL for Intel GPUs (untested).
    The device is the rank's own GPU, which becomes PyTorch's current device, or on all ranks the
    CPU if two ranks would share a GPU.
    """
    import torch
    rank, world_size, local_rank = find_ranks()
    kind, backend = None, "gloo"
    if torch.cuda.is_available():
        kind, backend = "cuda", "cpu:gloo,cuda:nccl"
    elif torch.xpu.is_available():
        kind, backend = "xpu", "cpu:gloo,xpu:xccl"
    torch.distributed.init_process_group(backend)
    gpu = own_gpu(local_rank, kind)
    if gpu is None:
        return rank, world_size, torch.device("cpu")
    torch.get_device_module(kind).set_device(gpu)
    return rank, world_size, torch.device(kind)


class CollectiveExit(SystemExit):
    """A SystemExit that all ranks raise with the same message; only rank 0 prints it."""


def exit_together(message: str | None) -> None:
    """Exit on all ranks if one of them passes a message. All ranks have to call this function."""
    messages = [text for text in gather(message) if text]
    if messages:
        raise CollectiveExit(messages[0])


@contextmanager
def rank_0_first(rank: int) -> Iterator[None]:
    """Run the block on rank 0, then on the others; sys.exit("message") on one rank ends all."""
    message = None
    if rank > 0:
        exit_together(None)  # wait for rank 0
    try:
        yield
    except SystemExit as end:
        message = end.code
    exit_together(message)
    if rank == 0:
        exit_together(None)  # wait for the others


def claim_failure(rank: int, world_size: int) -> bool:
    """Return True if this rank failed first, and so prints why; wait for the others to fail."""
    dist = sys.modules.get("torch.distributed")
    if not dist or not dist.is_initialized():
        time.sleep(5 if rank > 0 else 0)  # if rank 0 fails, too, the launcher ends this rank
        return True
    is_first = False
    with suppress(RuntimeError):  # rank 0, which hosts the store, has ended
        store = dist.distributed_c10d._get_default_store()
        is_first = store.add("failed ranks", 1) == 1
        deadline = time.monotonic() + 3
        while store.add("failed ranks", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.05)
    return is_first


def abort_by_mpiexec(code):
    """Tell mpiexec, as MPI_Abort does, to end all ranks: it may not notice that this rank ends."""
    with suppress(KeyError, ValueError, OSError):
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)
        time.sleep(1)


def run(main: Callable[[], None]) -> None:
    """Call main() on this rank; if it fails, print why and end the job.

    sys.exit("message") prints the message and exits with code 2; an exception prints its traceback.
    If several ranks fail, only the first one prints.
    """
    rank, world_size = own_rank(), 1
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback from each rank
    code, message = 0, None
    try:
        _, rank, world_size = find_launcher()
        main()
    except SystemExit as end:
        code, collective = end.code or 0, isinstance(end, CollectiveExit)
        if isinstance(code, str):
            code, message = 2, code
    except Exception:
        if world_size == 1:
            raise
        code, message, collective = 1, traceback.format_exc(), False

    if code:
        prints = own_rank() == 0
        if message and not collective:
            prints = claim_failure(rank, world_size)
        if message and prints:
            prefix = f"rank {rank}: " if rank > 0 else ""
            program = os.path.basename(sys.argv[0])
            print(f"{program}: {prefix}{message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        time.sleep(0.5 if prints else 5)  # the rank that prints ends the job before the others do
        if "MPI_LOCALRANKID" in os.environ and world_size > 1:  # mpiexec of MPICH or Intel MPI
            abort_by_mpiexec(code)
        os._exit(code)  # a pending collective would block a normal exit; the launcher ends the job
    dist = sys.modules.get("torch.distributed")
    if dist and dist.is_initialized():
        dist.destroy_process_group()  # gloo's threads may abort if they outlive Python
        time.sleep(0.2)  # FSDP's and DeepSpeed's threads release their tensors
