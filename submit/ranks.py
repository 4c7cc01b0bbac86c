"""Which rank is this process? One answer under mpiexec, srun, torchrun, deepspeed and plain python.

    rank, world_size, local_rank = find_ranks()
    torch.distributed.init_process_group()  # reads the variables that find_ranks() has set

The same file lies in every chapter. Copy it for your own programs: it needs mpi4py under mpiexec.
"""

import os
import random
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # deepspeed's, too
LAUNCHERS = {  # the variables in which the others give a process its rank and the world size
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),  # also Cray's, Intel's, and srun --mpi=pmi2
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
MPIEXECS = ("Open MPI", "MVAPICH", "MPICH")


def launched() -> "tuple[str | None, int, int]":
    """Return launcher, rank and world size, as the environment has them; None, 0, 1 without one."""
    env = os.environ
    launcher = next((name for name, (_, size) in LAUNCHERS.items() if size in env), None)
    rank, world_size = (int(env[name]) for name in LAUNCHERS[launcher]) if launcher else (0, 1)
    all_five = set(TORCHRUN) <= env.keys()  # a RANK alone is left from another job
    by_torchrun = "TORCHELASTIC_RUN_ID" in env or launcher in (None, "srun")
    # A world of torchrun's smaller than its launcher's is left from another job.
    if all_five and by_torchrun and int(env["WORLD_SIZE"]) >= world_size:
        return "torchrun", int(env["RANK"]), int(env["WORLD_SIZE"])
    return launcher, rank, world_size


def find_ranks() -> tuple[int, int, int]:
    """Return rank, world size and local rank; set the variables that torch.distributed reads.

    Exits with one line where the environment contradicts itself.
    """
    if "torch" in sys.modules:  # optimizers import it, and it keeps the process group that it finds
        import torch.distributed.nn  # noqa: F401
    env = os.environ
    launcher, rank, world_size = launched()
    if launcher == "torchrun":
        if "GROUP_WORLD_SIZE" in env:  # mpiexec -n 2 torchrun without --nnodes would train twice
            sizes = [size for _, size in LAUNCHERS.values() if env.get(size, "1") != "1"]
            refuse_other_sizes(sizes, int(env["GROUP_WORLD_SIZE"]))
        return rank, world_size, int(env["LOCAL_RANK"])
    refuse_lone_ranks(1 if launcher == "horovodrun" else world_size)  # its ranks meet by hvd.init()
    if launcher in MPIEXECS:
        local_rank, host, port = meet_by_mpi(launcher, world_size)
    elif launcher == "srun":  # without MPI: every rank finds the same place in Slurm's variables
        local_rank, nodes = env["SLURM_LOCALID"], env["SLURM_STEP_NODELIST"]
        host = re.sub(r"\[(\d+).*|,.*", r"\1", nodes)  # nid003, the first of nid[003-4,7]
        step = 16 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])  # a port a job step
        port = env.get("MASTER_PORT", 20000 + step % 10000)
    else:
        local_rank, host, port = 0, "127.0.0.1", free_port()
    env.update(zip(TORCHRUN, map(str, (rank, world_size, local_rank, host, port))))
    return rank, world_size, int(local_rank)


def load_mpi(launcher):
    """Return mpi4py's MPI, not yet initialized; exit with one line if it is not mpiexec's."""
    try:
        import mpi4py
        mpi4py.rc.initialize = False  # else a mismatched one aborts before the check below
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:
        sys.exit(f"mpi4py does not load; it has to be of the MPI of this mpiexec: {problem}")
    if (launcher == "Open MPI") != ("Open MPI" in MPI.Get_library_version()):
        sys.exit(f"this mpiexec is of {launcher}, mpi4py is not: "
                 "use the mpiexec in the same folder as python")
    return MPI


def meet_by_mpi(launcher, world_size):
    """Return the local rank, rank 0's node and a port that is free there: rank 0 tells all."""
    MPI = load_mpi(launcher)
    only_to_meet = not MPI.Is_initialized()  # else the program uses MPI itself
    if only_to_meet:
        MPI.Init()
    refuse_other_sizes([LAUNCHERS[launcher][1]], MPI.COMM_WORLD.size)
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks of my node
    local_rank = node.rank
    host = "127.0.0.1" if node.size == world_size else socket.gethostname()
    host, port = MPI.COMM_WORLD.bcast((host, free_port()))
    if only_to_meet:
        MPI.Finalize()
    return local_rank, host, port


def free_port():
    """A free port of this node, below those that the system itself hands out to connections."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)  # whatever the program's seed
        with suppress(OSError), socket.create_server(("", port)):
            return port


def refuse_lone_ranks(world_size: int, one_process: bool = False) -> None:
    """Exit where the environment counts other ranks than this program, which would train alone.

    find_ranks() calls it; call it yourself after hvd.init(). one_process: this program is meant to
    run alone, also in a batch script that has several tasks.
    """
    launcher, _, _ = launched()
    names = ["WORLD_SIZE"]
    if launcher in LAUNCHERS:
        names.append(LAUNCHERS[launcher][1])
    elif not launcher and not one_process:
        names.append("SLURM_NTASKS")
    refuse_other_sizes(names, world_size)


def refuse_other_sizes(names, count):
    for name in names:
        if int(os.environ.get(name, count)) != count:
            sys.exit(f"{name}={os.environ[name]}, but this program sees {count} of these ranks: "
                     f"start it as its README says, or unset {name}")


def gather(value: object) -> list:
    """Return the values of all ranks, in their order, on every rank; they have met before."""
    if hvd := horovod():
        return hvd.allgather_object(value, name="values")  # by name: their types may differ
    import torch.distributed as dist
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class SameOnAllRanks(SystemExit):
    """An exit of all ranks with the same message, which rank 0 prints."""


def horovod():
    """Return the Horovod that this program uses, or None."""
    return sys.modules.get("horovod.torch") or sys.modules.get("horovod.tensorflow")


def own_gpu(local_rank: int, kind: str | None = "cuda") -> int | None:
    """Return the index of this rank's GPU, or None where ranks would have to share one.

    NCCL refuses two ranks on one GPU. All ranks call it, after hvd.init(), or after
    init_process_group("cpu:gloo,cuda:nccl"): the ranks compare their GPUs over gloo.
    """
    import torch
    index = uuid = None
    if kind and torch.get_device_module(kind).is_available():
        gpus = torch.get_device_module(kind)
        index = local_rank % gpus.device_count()  # a rank may see its own GPU only, as number 0
        uuid = str(gpus.get_device_properties(index).uuid)
    return index if one_each(uuid) else None


def one_each(gpu: object) -> bool:
    """Return True if each rank has a GPU, and no two have the same. gpu: its name, or None."""
    gpus = gather(gpu)
    return None not in gpus and len(set(gpus)) == len(gpus)


def exit_together(message: str | None) -> None:
    """All ranks call it: if one of them has a message, all exit with it."""
    for line in gather(message):
        if line:
            raise SameOnAllRanks(line)


@contextmanager
def rank_0_first(rank: int) -> Iterator[None]:
    """Rank 0 runs the block, then all others do; a sys.exit("a line") on one of them ends all."""
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


def all_ranks_fail(launcher: str | None, world_size: int) -> bool | None:
    """Return True once all ranks have called this, False after three seconds in which one has not.

    They are counted in torch.distributed's store or, where they have not met yet, by MPI. None:
    there is no way to count them.
    """
    dist = sys.modules.get("torch.distributed")
    if world_size == 1:
        return True
    with suppress(RuntimeError, SystemExit):  # the store has ended; mpi4py does not load
        if dist and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            if store.add("said why", 0):
                time.sleep(10)  # another rank has, and its end will be that of the job
            store.add("failed ranks", 1)
            complete = soon(lambda: store.add("failed ranks", 0) == world_size)
            store.add("said why", not complete)
            return complete
        if launcher in MPIEXECS and not (MPI := load_mpi(launcher)).Is_finalized():
            if not MPI.Is_initialized():
                MPI.Init()  # waits for the other ranks
            complete = soon(MPI.COMM_WORLD.Ibarrier().Test)
            hvd = horovod()
            if complete and not (hvd and hvd.is_initialized()):  # which finalizes MPI at exit
                MPI.Finalize()  # before a rank exits: mpiexec would kill those that have not
            return complete
    return None


def soon(condition, seconds=3):
    """Return True once the condition holds, False if it does not within these seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


timer = None  # of alarm()


def alarm(seconds: int) -> None:
    """Restart a clock: if alarm() is not called again within these seconds, end the job. 0: stop.

    For libraries that would wait for ever for a rank that has stopped.
    """
    global timer
    if timer:
        timer.cancel()
    timer = threading.Timer(seconds, time_is_up, [seconds])
    timer.daemon = True
    if seconds:
        timer.start()


def time_is_up(seconds):
    rank = launched()[1]
    print(f"{os.path.basename(sys.argv[0])}: rank {rank}: no step within {seconds} s: another rank "
          "has stopped, or --timeout is too short\n", end="", file=sys.stderr, flush=True)
    time.sleep(1)  # the launcher passes on what was printed
    os.kill(os.getpid(), signal.SIGALRM)


def end_job(launcher: str | None, code: int) -> None:
    """End this process, and by it the whole job: what others wait for would never come."""
    if launcher in MPIEXECS:
        time.sleep(1)  # mpiexec passes on what was printed
        MPI = sys.modules.get("mpi4py.MPI")
        if MPI and MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(code)
        if launcher != "Open MPI":  # MPICH may miss an exit code, but no signal
            os.kill(os.getpid(), signal.SIGTERM)
    sys.stdout.flush()
    os._exit(code)  # the launcher sees it


def run(main: Callable[[], None]) -> None:
    """Call main(), and end this process as one of many.

    sys.exit("a line") ends the job with exit code 2, and an exception with its traceback. What all
    ranks fail with, rank 0 prints; what one rank fails with, that rank prints, with its number.
    """
    launcher, rank, world_size = launched()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback from each rank
    code, message = 0, None
    try:
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
        if not same:
            same = all_ranks_fail(launcher, world_size)
        if same is None and rank > 0:
            time.sleep(3)  # if rank 0 fails as well, its launcher ends this rank meanwhile
        if not same or rank == 0:
            number = f"rank {rank}: " if same is False or rank > 0 else ""
            line = f"{os.path.basename(sys.argv[0])}: {number}{message}\n"
            print(line, end="", file=sys.stderr, flush=True)
        if not same:
            end_job(launcher, code)
        if world_size > 1:
            time.sleep(0.5)  # rank 0, which hosts the store, leaves after the others
    dist = sys.modules.get("torch.distributed")
    if dist and dist.is_initialized():
        dist.destroy_process_group()  # gloo's threads may abort if they outlive Python
        time.sleep(0.2)  # FSDP and DeepSpeed keep these threads: they let go of their tensors
    sys.exit(code)
