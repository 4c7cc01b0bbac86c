"""submit/doctor.py finds what it claims to find: each fault is made for real where that is possible."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import BIN, PROGRAMS, ROOT, execute, load_module, observe, side_by_side
from test_launchers import ALLOCATION, OPENMPI_MPIEXEC, free_port, step
from tolerances import COUNT, THREE_DIGITS

DOCTOR = ROOT / "submit" / "doctor.py"
PYTHON = [sys.executable, DOCTOR]
APART = ["sh", "-c", '"$@"; exit $?', "sh"]  # a parent of its own, as another launcher would be
MPIEXEC = [BIN / "mpiexec", "-n", 2]
ALONE = ["setsid", "--wait"]  # in a session of its own: tests beside this one start doctors, too
BROKEN = PROGRAMS / "broken_doctor.py"
doctor = load_module(DOCTOR)


def as_one_job(starts):
    """The ranks of one job, started as srun does. Returns their codes, and what they printed together."""
    codes, printed = zip(*side_by_side(*starts))
    return codes, "".join(printed)


def assert_named(key, printed, *codes):
    """The fault is named, once, and no other; every one of these exit codes says so."""
    rows = re.findall(r"^\| (?!symptom|---)(.*) \|$", printed, re.M)
    assert len(rows) == 1 and rows[0].startswith(doctor.FAULTS[key][0]), printed
    assert "Traceback" not in printed and "nothing wrong" not in printed, printed
    assert codes and 0 not in codes, printed


def refused(key, words, env):
    done = execute(words, env=env, timeout=60)
    assert_named(key, done.out + done.err, done.code)
    return done.out


def test_nothing_is_wrong():
    jobs = [(ALONE, 1, "none; variables: none"), (MPIEXEC, 2, "mpiexec of MPICH.*PMI_RANK=0, PMI_SIZE=2"),
            ([BIN / "torchrun", "--nproc-per-node", 2, "--no-python"], 2, "torchrun.*RANK=0, WORLD_SIZE=2")]
    done = side_by_side(*[([*words, *PYTHON], {}) for words, *_ in jobs])
    for (_, ranks, launcher), (code, printed) in zip(jobs, done):
        assert code == 0 and printed.count("nothing wrong was found") == 1, printed
        assert re.search(f"^launcher: {launcher}", printed, re.M) and f"ranks: {ranks}, nodes: 1\n" in printed
        assert len(re.findall(r"^rank \d: .*CPU cores: \d.*GPUs: 0", printed, re.M)) == ranks
        measured = re.findall(r"^all-reduce over gloo, (\d+) .B: (\S+) s, bus bandwidth (\S+) GB/s$", printed, re.M)
        assert [size for size, *_ in measured] == ["4", "1", "16"]
        size, seconds, bandwidth = map(float, measured[-1])
        formula = 2 * (ranks - 1) / ranks * size * 2 ** 20 / seconds / 1e9
        assert bandwidth == pytest.approx(formula, rel=COUNT, abs=THREE_DIGITS)


def test_variables_that_contradict_each_other():
    jobs = {  # what is wrong: the fault, what its row says, the command, its environment
        "batch script's own process": ("contradiction", "SLURM_NTASKS=4, but", APART, ALLOCATION),
        "a stale world size": ("contradiction", "WORLD_SIZE=1, but", MPIEXEC, {"WORLD_SIZE": "1", "RANK": "1"}),
        "Open MPI starts MPICH": ("mpi", "OMPI_COMM_WORLD_SIZE=2", [*OPENMPI_MPIEXEC, "-n", 2], {})}
    done = side_by_side(*[([*words, *PYTHON], env) for *_, words, env in jobs.values()])
    for (key, said, *_), (code, printed) in zip(jobs.values(), done):
        assert_named(key, printed, code)
        assert said in printed


def test_a_variable_that_is_no_number(clean_environment, monkeypatch):
    monkeypatch.setattr(doctor, "fail", lambda *fault, **_: pytest.exit(str(fault)))
    clean_environment.update({"PMI_RANK": "0", "PMI_SIZE": "two"})
    with pytest.raises(pytest.exit.Exception, match=r"contradiction.*ValueError.*'two'"):
        doctor.recognise()


def test_a_launcher_that_is_not_known():
    codes, printed = as_one_job([([*ALONE, *PYTHON], {})] * 2)
    assert_named("launcher", printed, *codes)
    assert "2 processes" in printed


def test_a_package_that_is_not_there():
    assert "psutil" in refused("import", [sys.executable, "-S", DOCTOR], {})


def test_a_taken_port():
    with socket.create_server(("", 0)) as server:
        env = {"MASTER_PORT": str(server.getsockname()[1])}
        codes, printed = as_one_job([([*PYTHON, "--timeout", 0.1], step(rank, 2) | env) for rank in range(2)])
    assert_named("port", printed, *codes)


def test_a_rank_that_stays_alone():
    started = time.monotonic()
    first, second = side_by_side(*[([*APART, *PYTHON, "--timeout", 0.1], step(rank, 2) | {"MASTER_PORT": str(port)})
                                   for rank, port in ((0, free_port()), (1, free_port()))])
    for (code, printed), said in (first, "nothing from rank 1 in 0.1 s"), (second, "rank 1 on .*, localhost:.* 0.1 s:"):
        assert_named("meeting", printed, code)
        assert re.search(said, printed)
    assert time.monotonic() - started < 40


def test_a_rank_that_hangs():
    """One never starts MPI, the other takes no part in the all-reduce."""
    jobs = ([BIN / "mpiexec", "-n", 1, *PYTHON, "--timeout", 1, ":", "-n", 1, "sleep", 50],
            [*MPIEXEC, sys.executable, BROKEN, "hangs", DOCTOR, "--timeout", 3])
    done = side_by_side(*[(words, {}) for words in jobs], timeout=40)
    for key, (code, printed) in zip(("mpi meeting", "all-reduce"), done):
        assert_named(key, printed, code)


def test_a_wrong_sum_on_one_rank():
    assert "rank 1: " in refused("sum", [*MPIEXEC, sys.executable, BROKEN, "wrong", DOCTOR], {})


def test_an_interface_that_does_not_exist():
    env = {"GLOO_SOCKET_IFNAME": "eth99", "NCCL_SOCKET_IFNAME": "=eth99"}
    said = refused("interface", [*MPIEXEC, *PYTHON], env)
    assert re.search("rank 0: GLOO_SOCKET_IFNAME=eth99, NCCL_SOCKET_IFNAME==eth99; .* has .*lo", said)


@pytest.mark.parametrize(("variable", "value", "wrong"), [
    ("NCCL", "eth", False), ("NCCL", "=eth", True), ("NCCL", "=eth0", False), ("NCCL", "ib,hsn", False),
    ("NCCL", "ib,en", True), ("NCCL", "=ib0,eth0", False), ("NCCL", "^lo", False), ("NCCL", "^lo,eth,hsn", True),
    ("NCCL", "^=eth,lo", False), ("NCCL", "^=lo,eth0,hsn0", True), ("NCCL", "", False), ("GLOO", "eth0", False),
    ("GLOO", "eth", True), ("GLOO", "eth0,hsn0", False), ("GLOO", "eth0,ib0", True), ("GLOO", "", False)])
def test_how_interfaces_are_named(variable, value, wrong, monkeypatch):
    monkeypatch.setattr(doctor, "interfaces", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "hsn0": ["10.1.0.1"]})
    for name in "NCCL", "GLOO":
        monkeypatch.setenv(f"{name}_SOCKET_IFNAME", value if name == variable else "")
    assert bool(doctor.wrong_interface()) == wrong


UNSHARE = ["unshare", "--uts", "--mount", "sh", "-c"]
NODE = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'  # another hostname, another /etc/hosts


@pytest.mark.skipif(not shutil.which("unshare") or os.getuid() != 0 or subprocess.run(
    [*UNSHARE, NODE, "nid1", "/etc/hosts", "true"], capture_output=True).returncode != 0,
    reason="a hostname of its own for each rank needs unshare, as root")
def test_a_hostname_that_other_nodes_cannot_reach(tmp_path):
    starts, port = [], str(free_port())
    for rank in range(2):
        hosts = tmp_path / f"hosts{rank}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 nid{rank}\n")
        env = step(rank, 2, node=rank) | {"SLURM_LOCALID": "0", "MASTER_PORT": port}
        starts.append(([*UNSHARE, NODE, f"nid{rank}", hosts, *PYTHON], env))
    codes, printed = as_one_job(starts)
    assert_named("loopback", printed, *codes)
    assert "ranks: 2, nodes: 2\n" in printed and "127.0.1.1" in printed


def test_which_gpu_a_rank_takes(tmp_path):
    """Where nothing is wrong with that, the run itself ends where a real GPU would be needed."""
    rows = [("4,same", "one GPU", "have the same GPU: "), ("1,same", "too many ranks", "2 ranks, 1 GPUs"),
            ("1,own", "all-reduce", f"note: {doctor.FAULTS['ordinal'][0]}: ")]
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(observe, DOCTOR, 2, tmp_path / str(number), env={"FAKE_GPUS": gpus}, launcher=True,
                            timeout=60)
                for number, (gpus, *_) in enumerate(rows)]
    for (_, key, said), run in zip(rows, runs):
        done = run.result()
        assert_named(key, done.out + done.err, done.code)
        assert done.out.count(said) == 1
    assert "takes: 1\n" in done.out  # a single GPU, its own


@pytest.mark.skipif(not shutil.which("taskset") or os.cpu_count() < 2, reason="binding needs taskset and two cores")
def test_ranks_that_are_bound_to_one_core():
    assert "2 ranks on core 0 of" in refused("cores", [*MPIEXEC, "taskset", "-c", 0, *PYTHON], {})


def test_a_gpu_that_pytorch_does_not_see(monkeypatch, capsys):
    monkeypatch.setattr(doctor.os.path, "exists", lambda path: path == "/dev/nvidia0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    own = doctor.examine()
    assert list(doctor.diagnose([own])) == ["no CUDA"]
    assert not doctor.diagnose([own | {"driver": False}])
    assert list(doctor.diagnose([own | {"driver": False}, own | {"uuids": ["a", "b"], "takes": "b"}])) == ["no CUDA"]


def test_a_rank_whose_driver_errs(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: 1 / 0)
    assert "rank 1: ZeroDivisionError" in doctor.diagnose([{}, doctor.examine()])["failed"]


def test_every_fault_is_in_the_table():
    assert doctor.table().splitlines()[2:] == [f"| {' | '.join(row)} |" for row in doctor.FAULTS.values()]
    assert all(row.count(" | ") == 2 for row in doctor.table().splitlines()[2:])
    assert doctor.NAMES.keys() == {*doctor.chapter.LAUNCHERS, "torchrun"} and set(doctor.NOTES) < doctor.FAULTS.keys()
