"""cluster/doctor.py reports the most frequent faults, most of which these tests really cause."""

import re
import socket
import sys

import pytest
from conftest import BIN, ROOT, run_concurrently
from test_launchers import ALLOCATION, OPENMPI_MPIEXEC, srun_variables
from tolerances import COUNT

from cluster import doctor

DOCTOR = ["-m", "cluster.doctor"]
PYTHON = [sys.executable, *DOCTOR]
# The doctor counts the processes that its parent started. This parent starts only one.
WITHOUT_SIBLINGS = ["setsid", "--wait", "sh", "-c", '"$@"; exit $?', "sh"]
MPIEXEC = [BIN / "mpiexec", "-n", 2]


def assert_reported(finding, results):
    """Assert that the doctor prints this finding and no traceback, and that each process fails."""
    output = "".join(output for _, output in results)
    assert re.search(f"^doctor.py: (rank 1: )?.*{finding}", output, re.M), output
    assert "Traceback" not in output and "no problems" not in output, output
    assert all(code for code, _ in results), output


def test_one_and_two_ranks_without_a_fault():
    results = run_concurrently(([*WITHOUT_SIBLINGS, *PYTHON], {}), ([*MPIEXEC, *PYTHON], {}))
    for ranks, launcher, (code, output) in zip((1, 2), ("none", "MPICH"), results):
        assert code == 0 and output.count("no problems found") == 1, output
        assert f"launcher: {launcher}\n" in output and f"ranks: {ranks}, nodes: 1\n" in output
        assert len(re.findall(r"^rank \d: .*CPU cores: \d.*GPUs: 0", output, re.M)) == ranks
    row = re.search(r"gloo, 16 MB: (\S+) s, bus bandwidth (\S+) GB/s", output)
    seconds, bandwidth = map(float, row.groups())
    assert bandwidth == pytest.approx(2**24 / seconds / 1e9, rel=COUNT)


@pytest.mark.fault
@pytest.mark.parametrize(("finding", "command", "variables"), [
    ("SLURM_NTASKS=4, but", [*WITHOUT_SIBLINGS, *PYTHON], ALLOCATION),  # a batch script's process
    ("mpiexec comes from Open MPI", [*OPENMPI_MPIEXEC, "-n", 2, *PYTHON], {}),
    ("No module named 'psutil', in [^,]*python$", [sys.executable, "-S", *DOCTOR],
     {"PYTHONPATH": str(ROOT)}),  # which has nothing to do with it
    ("not a numpy, in (?P<path>.*)/numpy.py, found by PYTHONPATH=(?P=path):", [*MPIEXEC, *PYTHON],
     {"PYTHONPATH": "FOLDER"}),
    ("libstdc.*too short.*, found by LD_LIBRARY_PATH=", PYTHON, {"LD_LIBRARY_PATH": "FOLDER"}),
    ("MASTER_ADDR=x.invalid has no address", PYTHON,
     {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x.invalid", "MASTER_PORT": "9"}),
    ("all-reduce over gloo failed.*none9: set GLOO", [*MPIEXEC, *PYTHON],
     {"GLOO_SOCKET_IFNAME": "none9"})])
def test_what_keeps_a_rank_from_training_is_reported(finding, command, variables, tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError('not a numpy')")
    (tmp_path / "libstdc++.so.6").touch()
    variables = {name: value.replace("FOLDER", str(tmp_path)) for name, value in variables.items()}
    assert_reported(finding, run_concurrently((command, variables)))


@pytest.mark.fault
def test_processes_that_would_train_alone_are_reported():
    """Without a known launcher, each process takes itself for rank 0 of 1."""
    assert_reported("2 processes on .* would train alone", run_concurrently(*[(PYTHON, {})] * 2))


@pytest.mark.fault
def test_ranks_that_cannot_connect_are_reported():
    """Rank 0's port is in use, and the program that listens there does not answer rank 1."""
    with socket.create_server(("", 0)) as server:
        port = {"MASTER_PORT": str(server.getsockname()[1])}
        starts = [([*PYTHON, "--timeout", 1], srun_variables(rank, 2) | port) for rank in range(2)]
        rank_0, rank_1 = run_concurrently(*starts)
    assert_reported("rendezvous at localhost:.*address already in use.*one MASTER_PORT", [rank_0])
    assert_reported("rendezvous at localhost:.*timed out after 1 s.*one MASTER_PORT", [rank_1])


@pytest.mark.check
@pytest.mark.parametrize(("rank_0", "rank_1", "finding"), [
    ({"gpus": ["a", "b"], "gpu": "a"}, {"gpus": ["a", "b"], "gpu": "b"}, None),
    ({"gpus": ["a", "b"], "gpu": "a"}, {"gpus": ["a", "b"], "gpu": "a"}, "the same GPU"),
    ({"gpus": ["a"], "gpu": "a"}, {"gpus": ["a"], "gpu": "a"}, "2 ranks see 1 GPUs"),
    ({"has_driver": True, "gpu_problem": "The NVIDIA driver on your system is too old"}, {},
     "sees no GPU: The NVIDIA driver on your system is too old: ask for one GPU per rank"),
    ({"gpus": ["a"], "gpu": "a", "gpu_problem": "no kernel image"}, {"gpus": ["b"], "gpu": "b"},
     "cannot run a kernel on a: no kernel image"),
    ({"cores": [0]}, {"cores": [0]}, "bound to core 0"),
    ({"node": "nid1", "gloo": "127.0.1.1"}, {"node": "nid2"},
     "nid1: its hostname resolves to 127.0.1.1"),
    ({"node": "nid1"}, {"node": "nid2", "versions": "torch 1"}, "nid2: versions differ")])
def test_facts_of_two_ranks_give_a_finding(rank_0, rank_1, finding, monkeypatch):
    """The facts are made up, so neither a GPU nor a second node is needed."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    facts = doctor.examine()
    assert facts["gpu_problem"], facts  # PyTorch's own reason: the tests see no GPU
    facts |= {"has_driver": False, "gpu_problem": "", "cores": [0, 1], "all_cores": 4,
              "gloo": "10.0.0.1"}
    findings = doctor.diagnose([facts | rank_0, facts | rank_1 | {"local_rank": 1}])
    if finding is None:
        assert not findings
    else:
        assert len(findings) == 1 and finding in findings[0], findings
