"""submit/doctor.py on the most frequent faults, which are produced for real."""

import re
import socket
import sys

import pytest
from conftest import BIN, ROOT, load_module, side_by_side
from test_launchers import ALLOCATION, OPENMPI_MPIEXEC, step
from tolerances import COUNT

DOCTOR = ROOT / "submit" / "doctor.py"
PYTHON = [sys.executable, DOCTOR]
ALONE = ["setsid", "--wait", "sh", "-c", '"$@"; exit $?', "sh"]  # no sibling ranks
MPIEXEC = [BIN / "mpiexec", "-n", 2]


def assert_named(text, done):
    """Assert that the doctor prints the text, every process fails, and there is no traceback."""
    printed = "".join(output for _, output in done)
    assert re.search(f"^doctor.py: (rank 1: )?.*{text}", printed, re.M), printed
    assert "Traceback" not in printed and "nothing wrong" not in printed, printed
    assert all(code for code, _ in done), printed


def test_nothing_is_wrong():
    done = side_by_side(([*ALONE, *PYTHON], {}), ([*MPIEXEC, *PYTHON], {}))
    for ranks, launcher, (code, printed) in zip((1, 2), ("none", "MPICH"), done):
        assert code == 0 and printed.count("nothing wrong was found") == 1, printed
        assert f"launcher: {launcher}\n" in printed and f"ranks: {ranks}, nodes: 1\n" in printed
        assert len(re.findall(r"^rank \d: .*CPU cores: \d.*GPUs: 0", printed, re.M)) == ranks
    row = re.search(r"gloo, 16 MB: (\S+) s, bus bandwidth (\S+) GB/s", printed)
    seconds, bandwidth = map(float, row.groups())
    assert bandwidth == pytest.approx(2**24 / seconds / 1e9, rel=COUNT)


@pytest.mark.fault
@pytest.mark.parametrize(("text", "words", "env"), [
    ("SLURM_NTASKS=4, but", [*ALONE, *PYTHON], ALLOCATION),  # the batch script's own process
    ("mpiexec comes from Open MPI", [*OPENMPI_MPIEXEC, "-n", 2, *PYTHON], {}),
    ("psutil.*activate the environment", [sys.executable, "-S", DOCTOR], {}),
    ("all-reduce failed.*none9: set GLOO", [*MPIEXEC, *PYTHON], {"GLOO_SOCKET_IFNAME": "none9"})])
def test_what_keeps_a_rank_from_training(text, words, env):
    assert_named(text, side_by_side((words, env)))


@pytest.mark.fault
def test_each_process_trains_alone():
    """The launcher is unknown, so each process takes itself for rank 0 of 1."""
    assert_named("2 processes on .* would train alone", side_by_side(*[(PYTHON, {})] * 2))


@pytest.mark.fault
def test_ranks_cannot_connect():
    """Rank 0 finds its port taken, and rank 1 nobody who answers as PyTorch would."""
    with socket.create_server(("", 0)) as server:
        port = {"MASTER_PORT": str(server.getsockname()[1])}
        zero, one = side_by_side(*[([*PYTHON, "--timeout", 1], step(rank, 2) | port)
                                   for rank in range(2)])
    assert_named("rendezvous at localhost:.*address already in use.*unset MASTER_PORT", [zero])
    assert_named("rendezvous at localhost:.*timed out after 1 s.*unset MASTER_PORT", [one])


@pytest.mark.fault
def test_a_pytorch_that_is_too_old(tmp_path):
    """2.5 has no torch.accelerator, with which the chapters choose their GPUs."""
    for name in "torch/__init__.py", "torch/distributed.py":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("__version__ = '2.5.1'\n")
    assert_named("torch 2.5.1 .* older than 2.6, .*: load a newer", side_by_side(
        ([*ALONE, *PYTHON], {"PYTHONPATH": str(tmp_path)})))


@pytest.mark.fault
def test_guard_ends_a_hanging_process():
    """It must end a process that hangs in MPI or a GPU driver, where a thread could not."""
    program = ("import sys, signal; sys.path.insert(0, sys.argv.pop()); import doctor\n"
               "with doctor.Guard(-2, 0).stage('a test', 'do'): signal.pause()")
    assert_named("a test timed out", side_by_side(
        ([sys.executable, "-c", program, DOCTOR.parent], {})))


@pytest.mark.check
@pytest.mark.parametrize(("first", "second", "text"), [
    ({"uuids": ["a", "b"], "gpu": "a"}, {"uuids": ["a", "b"], "gpu": "b"}, None),
    ({"uuids": ["a", "b"], "gpu": "a"}, {"uuids": ["a", "b"], "gpu": "a"}, "the same GPU"),
    ({"uuids": ["a"], "gpu": "a"}, {"uuids": ["a"], "gpu": "a"}, "2 ranks see 1 GPUs"),
    ({"has_driver": True}, {"has_driver": True}, "sees no GPU: ask for one GPU per rank"),
    ({"has_driver": True, "driver_version": "575.57.08"}, {}, "driver 580 or newer"),
    ({"has_driver": True, "driver_version": "535.1", "cuda": "12.6"}, {}, "ask for one GPU"),
    ({"has_driver": True, "cuda": None}, {}, "built without CUDA: install another build"),
    ({"uuids": ["a"], "gpu": "a", "gpu_error": "no kernel image"}, {"uuids": ["b"], "gpu": "b"},
     "cannot run a kernel on GPU a: no kernel image"),
    ({"cores": [0]}, {"cores": [0]}, "bound to core 0"),
    ({"node": "nid1", "gloo": "127.0.1.1"}, {"node": "nid2"},
     "nid1: its hostname resolves to 127.0.1.1"),
    ({"node": "nid1"}, {"node": "nid2", "versions": "torch 1"}, "nid2: versions differ")])
def test_facts_of_ranks_are_judged(first, second, text, monkeypatch):
    """Without a GPU or a second node: rank 0 judges fabricated facts."""
    doctor = load_module(DOCTOR)
    monkeypatch.setenv("LOCAL_RANK", "0")
    usual = doctor.examine() | {"has_driver": False, "cuda": "13.0", "cores": [0, 1],
                                "driver_version": "", "all_cores": 4, "gloo": "10.0.0.1"}
    findings = doctor.diagnose([usual | first, usual | second | {"local_rank": 1}])
    if text is None:
        assert not findings
    else:
        assert len(findings) == 1 and text in findings[0], findings
