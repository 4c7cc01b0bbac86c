"""Finds this process's rank under any launcher, and connects all ranks through a store."""

import os
import re
import socket
import zlib
from datetime import timedelta

RENDEZVOUS = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # torchrun sets them
LAUNCHERS = {  # variables for rank and world size; connect() takes a new one for an MPI
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),  # also Cray PALS and Intel MPI
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


def own_rank() -> int:
    """Return the first valid variable's rank, or 0. Never raises: it decides who prints errors."""
    names = [*(rank_name for rank_name, _ in LAUNCHERS.values()), "RANK"]
    ranks = [int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()]
    return ranks[0] if ranks else 0


def find_launcher() -> tuple[str | None, int, int]:
    """Return launcher, rank and world size; without a launcher None, 0 and 1.

    Exit with a message if the variables do not tell the world size, or contradict each other.
    """
    env = os.environ
    launcher = next((name for name, (_, size) in LAUNCHERS.items() if size in env), None)
    if launcher == "MPICH" and "SLURM_STEP_NUM_TASKS" in env and "MPI_LOCALRANKID" not in env:
        launcher = "srun"  # srun --mpi=pmi2 has set both; mpiexec sets MPI_LOCALRANKID
    rank, world_size = map(read_number, LAUNCHERS[launcher]) if launcher else (0, 1)
    # Without torchrun under mpiexec these variables are left over from another job; under srun a
    # script may have set RANK=$SLURM_PROCID.
    is_current = "TORCHELASTIC_RUN_ID" in env or launcher in (None, "srun")
    if env.keys() >= RENDEZVOUS and is_current and read_number("WORLD_SIZE") >= world_size:
        agents = read_number("GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in env else world_size
        if world_size not in (1, agents):  # mpiexec -n 2 torchrun without --nnodes
            raise SystemExit(f"{launcher} has started {world_size} times torchrun, which knows of "
                             f"{agents}: name --nnodes, or use one launcher")
        return "torchrun", read_number("RANK"), read_number("WORLD_SIZE")
    return launcher, rank, world_size


def read_number(name):
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise SystemExit(f"{name} is {text!r}, not a number: start this with mpiexec, srun or "
                         "torchrun")
    return int(text)


def connect(launcher: str, rank: int, world_size: int, seconds: float):
    """Return a store of all ranks, whose keys the script does not use. Changes no variable."""
    import torch.distributed as dist
    env = os.environ
    if launcher == "torchrun":
        host, port = env["MASTER_ADDR"], env["MASTER_PORT"]
    elif launcher == "horovodrun":
        host, port = (env[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    elif launcher == "srun":  # all ranks read one address and port from the step's variables
        first = re.match(r"(\[.*?\]|[^,])+", env.get("SLURM_STEP_NODELIST", "localhost"))[0]
        host = re.sub(r"\[(\d+).*?\]", r"\1", first)  # nid3 of nid[3-5,7]
        port = zlib.crc32(f"{env.get('SLURM_JOB_ID')} {env.get('SLURM_STEP_ID')}".encode())
    else:
        host, port = rendezvous_by_mpi(launcher, world_size)
    has_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's, on its own port
    if not has_store:  # the script may open the port itself
        port = 20000 + (int(port) + 4999) % 10000
    is_server = rank == 0 and not has_store
    store = dist.TCPStore(host, int(port), world_size, is_server, timedelta(seconds=seconds), False)
    return dist.PrefixStore("agree", store)


def rendezvous_by_mpi(launcher, world_size):
    """Return rank 0's host and a free port there. Initializes MPI, which the script may use."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:
        raise SystemExit("cannot import mpi4py: it must be built against the same MPI as mpiexec: "
                         + str(problem).splitlines()[0]) from None
    os.environ.pop("PMI_FD", None)  # by which a rank that fails can end the job before the verdict
    if MPI.COMM_WORLD.size != world_size:
        raise SystemExit(f"mpiexec comes from {launcher}, but mpi4py is linked against another "
                         "MPI: use the mpiexec next to python")
    host = socket.gethostname()
    if MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).size == world_size:
        host = "127.0.0.1"
    with socket.create_server(("", 0)) as server:
        return MPI.COMM_WORLD.bcast((host, server.getsockname()[1]))
