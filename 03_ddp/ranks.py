"""Which rank is this process? One answer under mpiexec, srun, torchrun, deepspeed and plain python.

    rank, ranks, local_rank = find_ranks()
    torch.distributed.init_process_group()  # reads the variables that find_ranks() has set

The same file lies in every chapter. Take it along for your own programs: it needs nothing but
mpi4py, and that only under mpiexec. Under torchrun it has nothing to do.
"""

import ctypes
import errno
import gc
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

LAUNCHERS = {  # the variables in which each tells a process its rank, and how many ranks there are
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),  # Cray's, and srun --mpi=pmi2, too
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
UNSET = "start with mpiexec, srun or torchrun, or unset what another job has left"
MPIEXECS = "Open MPI", "MVAPICH", "MPICH"
HERE = "127.0.0.1"
STORES = []
moved = 0
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # deepspeed's, too


# Who am I?

def launched(env: "Mapping[str, str]" = os.environ) -> "tuple[str | None, int, int]":
    """Who started this process, its rank and the number of ranks; None, 0, 1 if nobody did.

    Exits with one line where the variables are no such numbers.
    """
    launcher, names = None, None
    for name, variables in LAUNCHERS.items():
        if variables[1] in env:
            launcher, names = name, variables
            break
    all_five = set(TORCHRUN) <= env.keys()  # a RANK alone is left over from elsewhere
    inside = "TORCHELASTIC_RUN_ID" in env or launcher in (None, "srun")  # mpiexec's own count more
    own = number(names[1], env) if names else 1
    if all_five and inside and number("WORLD_SIZE", env) >= own:
        launcher, names = "torchrun", TORCHRUN
    if not names:
        return None, 0, 1
    rank, ranks = number(names[0], env), number(names[1], env)
    if rank >= ranks:
        sys.exit(f"{names[0]}={rank}, but {names[1]}={ranks}: ranks count from 0; {UNSET}")
    return launcher, rank, ranks


def number(name, env=os.environ):
    text = env.get(name, "")
    if not text.isdecimal():
        sys.exit(f"{name}={text} is not a number: {UNSET}")
    return int(text)


def find_ranks(opens: bool = True) -> tuple[int, int, int]:
    """Return rank, number of ranks and rank on this node; set torchrun's five variables.

    On a single node rank 0 opens the place where all meet, if this program is to use it.
    Exits with one line where the environment contradicts itself.
    """
    launcher, rank, ranks = launched()
    if launcher == "torchrun":
        refuse_lone_torchruns()
    else:
        others = ["WORLD_SIZE"] if launcher else ["WORLD_SIZE", "SLURM_NTASKS"]
        advice = f"{ranks} started: start with srun, srun -n 1 or mpiexec"
        refuse_contradiction(others, ranks, advice)
        if launcher == "srun":
            local_rank, host, port = meet_by_slurm()
        elif launcher:
            local_rank, host, port = meet_by_mpi(launcher, ranks)
        else:
            local_rank, host, port = 0, HERE, free_port(HERE)
        values = rank, ranks, local_rank, host, port
        os.environ.update({name: str(value) for name, value in zip(TORCHRUN, values)})
    if "torch" in sys.modules:  # loaded by DDP, its functions would hold the process group for ever
        import torch.distributed.nn  # noqa: F401
        if opens and os.environ["MASTER_ADDR"] == HERE:
            open_here(rank)
    return rank, ranks, number("LOCAL_RANK")


def refuse_lone_torchruns():
    """Several that mpiexec or srun started without --nnodes would each train alone, in silence."""
    groups = os.environ.get("GROUP_WORLD_SIZE")
    for _, size in LAUNCHERS.values():
        if groups and size in os.environ and number(size) > 1 and os.environ[size] != groups:
            sys.exit(f"{size}={os.environ[size]}, but each torchrun counts {groups}: start it "
                     f"once, with --nnodes once on each node, or unset {size}")


def refuse_contradiction(names, ranks, advice):
    """One process of a job that was meant to have several would train alone, in silence."""
    for name in names:
        if name in os.environ and number(name) != ranks:
            sys.exit(f"{name}={os.environ[name]}, but {advice}, or unset {name}")


# Where do the ranks meet? At a port of rank 0's node, which all have to know.

def free_port(host):
    """One that no system gives to a program which asks for any: another would take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)  # whatever the program's seed
        try:
            socket.create_server((host if host == HERE else "", port)).close()
            return port
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE:
                raise


def meet_by_slurm():
    """Local rank; rank 0's node, which is the first; and a port that follows from job and step."""
    env = os.environ
    host = re.sub(r"\[(\d+).*|,.*", r"\1", env["SLURM_STEP_NODELIST"])  # of nid[003-4,7]: nid003
    port = 20000 + (16 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % 10000
    return int(env["SLURM_LOCALID"]), host, env.get("MASTER_PORT", port)


def meet_by_mpi(launcher, ranks):
    """Local rank; rank 0's node, and a port that is free there, which rank 0 tells the others."""
    try:
        import mpi4py
        mpi4py.rc(initialize=False, finalize=True)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as reason:
        sys.exit(f"mpi4py, which has to belong to the MPI of this mpiexec, does not load: {reason}")
    foreign = launcher == "Open MPI" and "MPICH" in MPI.Get_library_version()  # would abort
    if not foreign and not MPI.Is_initialized():
        start = ctypes.CDLL(MPI.__file__).MPI_Init_thread  # mpi4py's own holds watch() up meanwhile
        start(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    if not MPI.Is_initialized() or MPI.COMM_WORLD.size != ranks:
        sys.exit(f"the mpiexec that started these {ranks} ranks is not of mpi4py's MPI: "
                 "take the one beside python")

    sys.excepthook = end_all
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    host = HERE if node.size == ranks else socket.gethostname()
    host, port = MPI.COMM_WORLD.bcast((host, free_port(host)))
    all_have_it = MPI.COMM_WORLD.Ibarrier()

    def send_on():
        while not all_have_it.Test():
            time.sleep(0.01)

    # MPI sends while it is called: what rank 0 told may not have left, and the others would wait
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        threading.Thread(target=send_on).start()
    return node.rank, host, port


def open_here(rank):
    """PyTorch would listen on all addresses of this node; here nobody else can join."""
    from torch.distributed import TCPStore
    port = number("MASTER_PORT")
    if port > 65535:
        sys.exit(f"MASTER_PORT={port} is no port: {UNSET}")
    opened = "TORCHELASTIC_USE_AGENT_STORE"  # with this PyTorch's ranks take it that torchrun did
    if rank == 0 and os.environ.get(opened) != "True":
        listener = socket.create_server((HERE, port)).detach()
        store = TCPStore(HERE, port, is_master=True, wait_for_workers=False,
                         master_listen_fd=listener)
        STORES.append(store)  # as long as this process lives
    os.environ[opened] = "True"


# What ends all ranks?

def horovod() -> "ModuleType | None":
    """Horovod, if this program has imported it."""
    return sys.modules.get("horovod.torch") or sys.modules.get("horovod.tensorflow")


def gather(value: object) -> list:
    """The values of all ranks, in their order, on every rank."""
    if horovod():
        values = horovod().allgather_object(value, name="values")  # unnamed, types would not meet
    else:
        import torch.distributed as dist
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    moves()
    return values


@contextmanager
def rank_0_first(rank: int) -> Iterator[None]:
    """Rank 0 does what stands in the block, then the others do.

    If one of them exits with a message, all exit with it, instead of waiting for that one.
    """
    def exchange(message):
        for said in gather(message):
            if said:
                sys.exit(said)

    if rank > 0:
        exchange(None)  # wait for rank 0
    message = None
    try:
        yield
    except SystemExit as end:
        message = end.code
    exchange(message)
    if rank == 0:
        exchange(None)  # wait for the others


def run(main: Callable[[], None]) -> None:
    """Call main(), and end this process as one of many.

    sys.exit("a line") in main() is a mistake of the user's: rank 0 prints the line, the exit code
    is 2. Another exception ends this rank with a traceback, and its launcher ends the others.
    """
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has not
        sys.stdout.reconfigure(line_buffering=True)  # through a pipe, too, a line appears at once
    code = 0
    try:
        if launched()[0] in MPIEXECS:
            sys.excepthook = end_all
        if launched()[2] > 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a rank waits for may never come
        main()
    except SystemExit as end:
        code = end_by_mistake(end.code)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception as problem:
        if "Horovod has been shut down" in str(problem):
            code = 1  # another rank failed, and says why
        elif is_no_meeting(problem) and not group():
            place = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
            code = end_by_mistake(f"no meeting at {place}: start all, on a free MASTER_PORT")
            if mpi := sys.modules.get("mpi4py.MPI"):  # its end waits for ranks that wait to meet
                time.sleep(1)  # the launcher passes on what was printed
                mpi.COMM_WORLD.Abort(code)
        else:
            raise
    if group():  # before Python ends, and after DDP: gloo's threads may abort if they outlive it
        gc.collect()
        group().destroy_process_group()
    sys.exit(code)


def end_all(*problem):
    """For sys.excepthook: an exception on one rank ends all that mpiexec has started."""
    _, rank, ranks = launched()
    print(f"rank {rank} of {ranks} ends all:", file=sys.__stderr__)
    traceback.print_exception(*problem, file=sys.__stderr__)
    time.sleep(1)  # the launcher passes on what was printed
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized():
        mpi.COMM_WORLD.Abort(1)
    os.kill(os.getpid(), signal.SIGTERM)  # mpiexec overlooks an exit before MPI's start


def watch(seconds: int) -> None:
    """End the job if this rank does not call moves() for so long: it waits for one that is stopped.

    Who that is can be seen on the same node alone. A single rank is not watched.
    """
    if launched()[2] > 1:
        threading.Thread(target=end_after, args=[seconds], daemon=True).start()


def moves() -> None:
    """This rank gets on."""
    global moved
    moved += 1


def end_after(seconds):
    _, rank, _ = launched()
    waited, seen = 0, moved
    while waited < seconds + min(rank, 10):  # the lowest rank speaks for all
        time.sleep(0.5)  # counted: a job that was stopped as a whole has not waited
        waited = waited + 0.5 if moved == seen else 0
        seen = moved
    stopped = stopped_ranks()
    who = " and ".join(f"rank {number}, process {process}" for process, number in stopped.items())
    said = f"{who}, is stopped" if who else "none is stopped on its node, one may hang elsewhere"
    print(f"{Path(sys.argv[0]).name}: rank {rank} stands still for {seconds} s (--timeout): {said}",
          file=sys.stderr, flush=True)
    time.sleep(1)  # the launcher passes on what was printed
    for process in stopped or [os.getpid()]:
        os.kill(process, signal.SIGKILL)  # then the launcher ends the others


def stopped_ranks():
    """Of this job's processes on this node that a signal or a debugger has stopped: the ranks."""
    found, meeting = {}, "HOROVOD_GLOO_RENDEZVOUS_PORT"  # horovodrun's ranks have a shell each
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            pairs = (folder / "environ").read_text().split("\0") if state in "tT" else []
        except OSError:
            continue  # it has ended meanwhile, or is somebody else's
        env = dict(pair.partition("=")[::2] for pair in pairs)
        mine = int(parent) == os.getppid() or env.get(meeting, "none") == os.environ.get(meeting)
        if env and mine:
            found[int(folder.name)] = launched(env)[1]
    return found


def is_no_meeting(problem):
    taken = getattr(problem, "errno", None) == errno.EADDRINUSE
    return taken or type(problem).__name__ in ("DistNetworkError", "DistStoreError")


def end_by_mistake(message):
    """Rank 0 prints the message for all. Returns the exit code."""
    try:
        _, rank, _ = launched()
    except SystemExit:  # that is the mistake
        rank = 0
    marks = {"TORCHELASTIC_RUN_ID", "CROSS_RANK", *(size for _, size in LAUNCHERS.values())}
    by_hand = not marks & os.environ.keys()  # then rank 0 may not even have been started
    if rank > 0 and (group() or not by_hand):
        time.sleep(2)  # rank 0 speaks, before the launcher ends it
    elif message:
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(message).split())}", file=sys.stderr)
    return 2 if message else 0


def group():
    """torch.distributed, if this program has made its process group."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist and dist.is_initialized() else None


# For programs that torch.distributed does not start

def refuse_ranks() -> None:
    """For a program of one process: several of it would each train the same."""
    for size in [*(size for _, size in LAUNCHERS.values()), "WORLD_SIZE"]:
        if size in os.environ and number(size) > 1:
            sys.exit(f"{os.environ[size]} ranks would each train the same: start `python "
                     f"{Path(sys.argv[0]).name}` without a launcher and without {size}, "
                     "or see the next chapters")


def refuse_other_mpi() -> None:
    """Before hvd.init(), which would abort under the mpiexec of another MPI than Horovod's."""
    launcher, _, _ = launched()
    if launcher == "Open MPI":
        import mpi4py
        mpi4py.rc.initialize = False  # only to look at it
        from mpi4py import MPI
        if "MPICH" in MPI.Get_library_version():
            sys.exit("the mpiexec that started these ranks is Open MPI's, Horovod's MPI is MPICH: "
                     "take its mpiexec")


def refuse_lone_ranks(seen: int) -> None:
    """After hvd.init(): ranks that Horovod does not see would each train alone, in silence."""
    launcher, _, _ = launched()
    names = {"torchrun": ["WORLD_SIZE"], None: ["WORLD_SIZE", "SLURM_NTASKS"]}.get(launcher)
    refuse_contradiction(names or [LAUNCHERS[launcher][1]], seen,
                         f"Horovod sees {seen}: start with mpiexec, srun --mpi=pmi2 or horovodrun "
                         "--gloo; for one on purpose srun -n 1")
