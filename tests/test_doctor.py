"""The doctor reports the most frequent faults, most of which these tests really cause."""

import re
import socket
import sys

import pytest
from conftest import BIN, ROOT, run_concurrently
from test_launchers import ALLOCATION, OPENMPI_MPIEXEC, srun_variables
from tolerances import COUNT

from cluster.doctor.facts import examine, find_problems

DOCTOR = ["-m", "cluster.doctor"]
PYTHON = [sys.executable, *DOCTOR]
# The doctor counts the processes that its parent started. This parent starts only one.
WITHOUT_SIBLINGS = ["setsid", "--wait", "sh", "-c", '"$@"; exit $?', "sh"]
MPIEXEC = [BIN / "mpiexec", "-n", 2]


def assert_reported(finding, results):
    """Assert that the doctor prints this finding and no traceback, and that each process fails."""
    output = "".join(output for _, output in results)
    assert re.search(f"^doctor: (rank 1: )?.*{finding}", output, re.M), output
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
    ("No module named 'psutil', in [^,]*python; PYTHONPATH", [sys.executable, "-S", *DOCTOR],
     {"PYTHONPATH": str(ROOT)}),
    ("not a numpy, in FOLDER/numpy.py; PYTHONPATH=FOLDER: unset it", [*MPIEXEC, *PYTHON],
     {"PYTHONPATH": "FOLDER"}),
    ("Unable to find address for: none9: set GLOO_SOCKET_IFNAME", [*MPIEXEC, *PYTHON],
     {"GLOO_SOCKET_IFNAME": "none9"})])
def test_what_keeps_a_rank_from_training_is_reported(finding, command, variables, tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError('not a numpy')")
    variables = {name: value.replace("FOLDER", str(tmp_path)) for name, value in variables.items()}
    finding = finding.replace("FOLDER", re.escape(str(tmp_path)))
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


@pytest.mark.fault
def test_packages_that_cannot_be_imported_are_reported(tmp_path):
    """Horovod without its library for PyTorch prints a line, and can be imported."""
    not_built = "Extension horovod.torch has not been built: no file"
    for folder, code in {"horovod": "", "horovod/torch": f"print('{not_built}')\nprint('Warning!')",
                         "deepspeed": "import os; os.abort()"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(code)
    results = run_concurrently(([*MPIEXEC, *PYTHON], {"PYTHONPATH": str(tmp_path)}))
    assert_reported(f"import horovod.torch.* fails .*: {not_built}: look for", results)
    assert "`import deepspeed` fails (-6)" in results[0][1]


SLURM_JOB = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
NODE_1, NODE_2 = {"node": "nid1"}, {"node": "nid2"}


@pytest.mark.check
@pytest.mark.parametrize(("rank_0", "rank_1", "findings"), [
    ({"gpus": ["a", "b"], "gpu": "a"}, {"gpus": ["a", "b"], "gpu": "b"}, []),
    ({"gpus": ["a"], "gpu": "a", "CUDA_VISIBLE_DEVICES": "0"},  # each rank sees its own GPU only
     {"gpus": ["b"], "gpu": "b", "CUDA_VISIBLE_DEVICES": "1"}, []),
    ({"gpus": ["a", "b"], "gpu": "a"}, {"gpus": ["a", "b"], "gpu": "a"},
     ["wrong: vm: several ranks use the same GPU"]),
    ({"gpus": ["a"], "gpu": "a"}, {"gpus": ["a"], "gpu": "a"}, ["wrong: vm: 2 ranks see 1 GPUs"]),
    ({"has_driver": True, "gpu_problem": "The NVIDIA driver on your system is too old"}, {},
     ["wrong: vm: a rank sees no GPU: The NVIDIA driver on your system is too old: ask for one"]),
    ({"gpus": ["a"], "gpu": "a", "gpu_problem": "no kernel image"}, {"gpus": ["b"], "gpu": "b"},
     ["wrong: vm: cannot run a kernel on a: no kernel image"]),
    ({"cores": [0]}, {"cores": [0]}, ["wrong: vm: 2 ranks are bound to core 0"]),
    ({"all_cores": 8, "cores": [0]}, {"all_cores": 8}, ["note: vm: a rank has 1 of 8 cores"]),
    (NODE_1 | {"gloo": "127.0.1.1"}, NODE_2, ["wrong: nid1: its hostname resolves to 127.0.1.1"]),
    ({"own_address": ""}, {}, ["note: vm: its hostname leads to no address of this node"]),
    (NODE_1, NODE_2 | {"versions": "torch 1"}, ["wrong: nid2: versions differ"]),
    (SLURM_JOB, {}, ["note: the job has 4 GPUs per node, and PyTorch sees none",
                     "note: the job has 2 nodes (SLURM_JOB_NUM_NODES), and these ranks are on 1"])])
def test_facts_of_two_ranks_give_these_findings(rank_0, rank_1, findings, monkeypatch):
    """The facts are made up, so neither a GPU nor a second node is needed."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    facts = examine()
    assert facts["gpu_problem"], facts  # PyTorch's own reason: the tests see no GPU
    facts |= {"node": "vm", "has_driver": False, "gpu_problem": "", "cores": [0, 1], "all_cores": 4,
              "own_packages": [], "gloo": "10.0.0.1", "own_address": "10.0.0.1"}
    ranks = [facts | rank_0, facts | rank_1 | {"local_rank": 1}]
    lines = [f"{severity}: {text}" for severity, text in find_problems(ranks)]
    assert len(lines) == len(findings), lines
    for line, finding in zip(lines, findings):
        assert line.startswith(finding), lines
