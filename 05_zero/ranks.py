"""Which rank is this process? One answer under mpiexec, srun, torchrun, deepspeed and plain python.

    rank, world_size, local_rank = find_ranks()
    torch.distributed.init_process_group()  # reads the variables that find_ranks() has set

Every chapter has the same file. Copy it for your own programs: it needs mpi4py under mpiexec.
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

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # also of deepspeed
LAUNCHERS = {  # other launchers' rank, world size and local rank; None: MPI knows it
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
MPIEXECS, NO_MPI = ("Open MPI", "MVAPICH", "MPICH"), ("srun", "Flux", "jsrun")
JOBS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "FLUX_JOB_ID", "LSB_JOBID")
stores = []  # keeps count_local_ranks()'s store alive: init_process_group() shares it


def number_of(name: str) -> int:
    """Return an environment variable as a number; exit if it is not one."""
    text = os.environ[name]
    if not text.isdecimal():
        raise SameOnAllRanks(f"{name}={text} is not a number: unset it, or start this program with "
                             "mpiexec, srun or torchrun")
    return int(text)


def own_number() -> int:
    """Return this rank's number from the environment, or 0; rank 0 prints for all ranks."""
    names = [*(rank for rank, _, _ in LAUNCHERS.values()), "RANK"]
    numbers = [os.environ[name] for name in names if os.environ.get(name, "").isdecimal()]
    return int(numbers[0]) if numbers else 0


def launched() -> "tuple[str | None, int, int]":
    """Return launcher, rank and world size from the environment; without a launcher None, 0, 1.

    The world size is 0 if no variable contains it.
    """
    env = os.environ
    matching = [name for name, (rank, size, _) in LAUNCHERS.items() if (size or rank) in env]
    launcher, rank, world_size = None, 0, 1
    if matching:
        launcher = matching[0]
        rank_name, size_name, _ = LAUNCHERS[launcher]
        rank = number_of(rank_name)
        world_size = number_of(size_name) if size_name else 0
    # A RANK alone, or a WORLD_SIZE below the launcher's, is left over from another job.
    complete = set(TORCHRUN) - {"LOCAL_RANK"} <= env.keys()
    by_torchrun = "TORCHELASTIC_RUN_ID" in env or launcher in (None, "srun")
    if complete and by_torchrun and number_of("WORLD_SIZE") >= world_size:
        return "torchrun", number_of("RANK"), number_of("WORLD_SIZE")
    return launcher, rank, world_size


def find_ranks() -> tuple[int, int, int]:
    """Return rank, world size and local rank; set the variables that torch.distributed reads.

    MASTER_ADDR and MASTER_PORT are kept if they are set. Exits with one line if the environment
    contradicts itself.
    """
    if "torch" in sys.modules:
        # It binds the default group when it is imported; torch.optim would import it too late.
        import torch.distributed.nn  # noqa: F401
    env = os.environ
    launcher, rank, world_size = launched()
    if launcher == "torchrun":
        if "GROUP_WORLD_SIZE" in env:  # mpiexec -n 2 torchrun without --nnodes would train twice
            names = [size for _, size, _ in LAUNCHERS.values() if env.get(size or "", "1") != "1"]
            refuse_other_sizes(names, int(env["GROUP_WORLD_SIZE"]))
        if "LOCAL_RANK" not in env:  # Kubernetes' PyTorchJob
            env["LOCAL_RANK"] = str(count_local_ranks(rank, world_size))
        return rank, world_size, number_of("LOCAL_RANK")
    if not world_size:
        raise SameOnAllRanks(
            f"{LAUNCHERS[launcher][0]} is set, but no variable contains the number of ranks: start "
            "this with mpiexec --pmi=cray, srun --mpi=pmi2, your mpi4py's mpiexec, or torchrun")
    refuse_lone_ranks(1 if launcher == "horovodrun" else world_size)  # Horovod connects ranks
    if launcher in MPIEXECS:
        local_rank, host, port = rendezvous_by_mpi(launcher, world_size)
    elif launcher in NO_MPI:  # all ranks read one address and port from the job's variables
        local_rank = number_of(LAUNCHERS[launcher][2])
        nodes = env.get("SLURM_STEP_NODELIST", "")
        host = re.sub(r"\[(\d+).*|,.*", r"\1", nodes)  # nid003, the first of nid[003-4,7]
        if not host and "MASTER_ADDR" not in env:
            raise SameOnAllRanks(f"{launcher} does not name the node of rank 0: set MASTER_ADDR")
        step = " ".join(env.get(name, "") for name in JOBS)
        port = 20000 + zlib.crc32(step.encode()) % 10000  # one per job step
    else:
        local_rank, host, port = 0, "127.0.0.1", free_port()
    host, port = env.get("MASTER_ADDR", host), env.get("MASTER_PORT", port)
    env.update(zip(TORCHRUN, map(str, (rank, world_size, local_rank, host, port))))
    return rank, world_size, local_rank


def count_local_ranks(rank, world_size):
    """Return how many lower ranks are on this node; all ranks tell rank 0's store their host."""
    from torch.distributed import TCPStore
    address, port = os.environ["MASTER_ADDR"], number_of("MASTER_PORT")
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
    started_mpi = not MPI.Is_initialized()  # if not, the program uses MPI itself
    if started_mpi:
        MPI.Init()
    refuse_other_sizes([LAUNCHERS[launcher][1]], MPI.COMM_WORLD.size)
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks on this node
    local_rank = node.rank
    host = "127.0.0.1" if node.size == world_size else socket.gethostname()
    host, port = MPI.COMM_WORLD.bcast((host, free_port()))
    if started_mpi:
        MPI.Finalize()
    return local_rank, host, port


def free_port():
    """Return a free port of this node, below the range that the system uses for connections."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)  # whatever the program's seed
        with suppress(OSError), socket.create_server(("", port)):
            return port


def refuse_lone_ranks(world_size: int, one_process: bool = False) -> None:
    """Exit if the environment's number of ranks differs: each rank would train alone.

    find_ranks() calls it; call it yourself after hvd.init(). one_process: this program is meant to
    run alone, also in a batch job of several tasks.
    """
    launcher, _, _ = launched()
    if not launcher and "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        raise SameOnAllRanks("RANK is set without WORLD_SIZE, MASTER_ADDR and MASTER_PORT: set "
                             "these, too, or unset RANK if it is left over from another job")
    names = ["WORLD_SIZE"]
    if launcher in LAUNCHERS:
        names += filter(None, LAUNCHERS[launcher][1:2])
    elif not launcher and not one_process:
        names.append("SLURM_NTASKS")
    refuse_other_sizes(names, world_size)


def refuse_other_sizes(names, count):
    for name in names:
        if int(os.environ.get(name, count)) != count:
            raise SameOnAllRanks(
                f"{name}={os.environ[name]}, but this program sees {count} of these ranks: start "
                f"it as its README says, or unset {name} if it is left over from another job")


def gather(value: object) -> list:
    """Return the values of all ranks, in rank order, on every rank. The ranks must be connected."""
    hvd = sys.modules.get("horovod.torch") or sys.modules.get("horovod.tensorflow")
    if hvd:
        return hvd.allgather_object(value, name="values")  # named, because types may differ
    import torch.distributed as dist
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_gpu(local_rank: int, kind: str | None = "cuda") -> int | None:
    """Return the index of this rank's GPU, or None if ranks would have to share one.

    NCCL refuses two ranks on one GPU. All ranks call it, after hvd.init(), or after
    init_process_group("cpu:gloo,cuda:nccl"): the ranks compare their GPUs over gloo.
    """
    import torch
    index = uuid = None
    if kind and torch.get_device_module(kind).is_available():
        gpus = torch.get_device_module(kind)
        index = local_rank % gpus.device_count()  # a rank may see only its own GPU, as number 0
        uuid = str(gpus.get_device_properties(index).uuid)
    uuids = gather(uuid)
    return index if None not in uuids and len(set(uuids)) == len(uuids) else None


def init_ranks() -> tuple:
    """Connect all ranks under any launcher; return rank, world size and this rank's device.

    gloo carries CPU tensors, NCCL GPU tensors. The device is the rank's own GPU, set as the current
    one, or the CPU on all ranks if two of them would share a GPU.
    """
    import torch
    rank, world_size, local_rank = find_ranks()
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    gpu = own_gpu(local_rank)
    if gpu is not None:
        torch.cuda.set_device(gpu)
    return rank, world_size, torch.device("cpu" if gpu is None else "cuda")


class SameOnAllRanks(SystemExit):
    """An exit of all ranks with the same line, which rank 0 prints."""


def exit_together(line: str | None) -> None:
    """Exit on all ranks with the same line if one of them has a line. All ranks call it."""
    lines = [text for text in gather(line) if text]
    if lines:
        raise SameOnAllRanks(lines[0])


@contextmanager
def rank_0_first(rank: int) -> Iterator[None]:
    """Run the block on rank 0, then on the others; sys.exit("a line") on one rank ends all."""
    line = None
    if rank > 0:
        exit_together(None)  # wait for rank 0
    try:
        yield
    except SystemExit as end:
        line = end.code
    exit_together(line)
    if rank == 0:
        exit_together(None)  # wait for the others


def claim_failure(rank: int, world_size: int) -> bool:
    """Return True if this rank is to report why the job ends; wait for other ranks that fail."""
    dist = sys.modules.get("torch.distributed")
    if not dist or not dist.is_initialized():
        time.sleep(5 if rank > 0 else 0)  # if rank 0 fails, too, the launcher ends this rank
        return True
    first = False
    with suppress(RuntimeError):  # rank 0, which hosts the store, has ended
        store = dist.distributed_c10d._get_default_store()
        first = store.add("failed ranks", 1) == 1
        deadline = time.monotonic() + 3
        while store.add("failed ranks", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.05)
    return first


def abort_by_hydra(code):
    """Tell mpiexec, as MPI_Abort does, to end all ranks: it can miss that this one exits."""
    with suppress(KeyError, ValueError, OSError):
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)
        time.sleep(1)


def run(main: Callable[[], None]) -> None:
    """Call main() on this rank; if it fails, print why and end the job.

    sys.exit("a line") prints that line, with exit code 2; an exception prints its traceback. If
    several ranks fail, only the first one prints.
    """
    rank, world_size = own_number(), 1
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback from each rank
    code, message = 0, None
    try:
        _, rank, world_size = launched()
        main()
    except SystemExit as end:
        code, same = end.code or 0, isinstance(end, SameOnAllRanks)
        if isinstance(code, str):
            code, message = 2, code
    except Exception:
        if world_size == 1:
            raise
        code, message, same = 1, traceback.format_exc(), False

    if message:
        reports = own_number() == 0 if same else claim_failure(rank, world_size)
        if reports:
            number = f"rank {rank}: " if rank > 0 else ""
            program = os.path.basename(sys.argv[0])
            print(f"{program}: {number}{message}", file=sys.stderr, flush=True)
        time.sleep(0.5)  # the launcher passes on what was printed
    if code:
        sys.stdout.flush()
        if "MPI_LOCALRANKID" in os.environ and world_size > 1:  # mpiexec of MPICH or Intel MPI
            abort_by_hydra(code)
        os._exit(code)  # a pending collective would block a normal exit; the launcher ends the job
    dist = sys.modules.get("torch.distributed")
    if dist and dist.is_initialized():
        dist.destroy_process_group()  # gloo's threads may abort if they outlive Python
        time.sleep(0.2)  # FSDP's and DeepSpeed's threads release their tensors
