"""submit/doctor.py finds what it claims to find: the most frequent faults are made for real."""

import re
import socket
import sys

import pytest
from conftest import BIN, ROOT, load_module, side_by_side
from test_launchers import ALLOCATION, OPENMPI_MPIEXEC, free_port, step
from tolerances import COUNT, THREE_DIGITS

DOCTOR = ROOT / "submit" / "doctor.py"
PYTHON = [sys.executable, DOCTOR]
APART = ["sh", "-c", '"$@"; exit $?', "sh"]  # a parent of its own, as another launcher would be
MPIEXEC = [BIN / "mpiexec", "-n", 2]
ALONE = ["setsid", "--wait"]  # a session of its own: other tests start doctors, too
doctor = load_module(DOCTOR)


def assert_named(key, printed, *codes):
    """The fault is named, once, and no other; every one of these exit codes says so."""
    rows = re.findall(r"^\| (?!symptom|---)(.*) \|$", printed, re.M)
    assert len(rows) == 1 and rows[0].startswith(doctor.FAULTS[key][0]), printed
    assert "Traceback" not in printed and "nothing wrong" not in printed, printed
    assert codes and 0 not in codes, printed


def test_nothing_is_wrong():
    jobs = [(ALONE, 1, "none; variables: none"),
            (MPIEXEC, 2, "mpiexec of MPICH.*PMI_RANK=0, PMI_SIZE=2")]
    done = side_by_side(*[([*words, *PYTHON], {}) for words, *_ in jobs])
    for (_, ranks, launcher), (code, printed) in zip(jobs, done):
        assert code == 0 and printed.count("nothing wrong was found") == 1, printed
        assert re.search(f"^launcher: {launcher}", printed, re.M)
        assert f"ranks: {ranks}, nodes: 1\n" in printed
        assert len(re.findall(r"^rank \d: .*CPU cores: \d.*GPUs: 0", printed, re.M)) == ranks
        rows = re.findall(r"gloo, (\d+) .B: (\S+) s, bus bandwidth (\S+) GB/s$", printed, re.M)
        assert [size for size, *_ in rows] == ["4", "1", "16"]
        size, seconds, bandwidth = map(float, rows[-1])
        formula = 2 * (ranks - 1) / ranks * size * 2 ** 20 / seconds / 1e9
        assert bandwidth == pytest.approx(formula, rel=COUNT, abs=THREE_DIGITS)


@pytest.mark.fault
def test_what_keeps_a_rank_from_starting():
    """The batch script's own process; Open MPI's mpiexec and MPICH; a package that is missing."""
    jobs = [("contradiction", "SLURM_NTASKS=4, but", [*APART, *PYTHON], ALLOCATION),
            ("mpi", "OMPI_COMM_WORLD_SIZE=2", [*OPENMPI_MPIEXEC, "-n", 2, *PYTHON], {}),
            ("import", "psutil", [sys.executable, "-S", DOCTOR], {})]
    done = side_by_side(*[(words, env) for *_, words, env in jobs])
    for (key, detail, *_), (code, printed) in zip(jobs, done):
        assert_named(key, printed, code)
        assert detail in printed


@pytest.mark.fault
def test_each_process_trains_alone():
    """The launcher is not known, so each takes itself for rank 0 of 1."""
    codes, printed = zip(*side_by_side(*[([*ALONE, *PYTHON], {})] * 2))
    assert_named("launcher", "".join(printed), *codes)
    assert "2 processes" in "".join(printed)


@pytest.mark.fault
@pytest.mark.slow
def test_a_taken_port():
    with socket.create_server(("", 0)) as server:
        env = {"MASTER_PORT": str(server.getsockname()[1])}
        codes, printed = zip(*side_by_side(
            *[([*PYTHON, "--timeout", 0.1], step(rank, 2) | env) for rank in range(2)]))
    assert_named("port", "".join(printed), *codes)


@pytest.mark.fault
def test_a_rank_that_stays_alone():
    words = [*APART, *PYTHON, "--timeout", 0.1]
    ranks = side_by_side(*[(words, step(rank, 2) | {"MASTER_PORT": str(free_port())})
                           for rank in range(2)], timeout=40)
    for (code, printed), detail in zip(ranks, (
            "nothing from rank 1 in 0.1 s", "rank 1 on .*, localhost:.* 0.1 s:")):
        assert_named("meeting", printed, code)
        assert re.search(detail, printed)


@pytest.mark.fault
def test_what_hangs_is_ended_by_its_guard():
    """A program waits for ever, also for MPI or a GPU's driver, which no thread could end."""
    program = ("import sys, signal; sys.path.insert(0, sys.argv.pop()); import doctor; "
               "doctor.watch(-2)('mpi meeting', 'a test'); signal.pause()")
    (code, printed), = side_by_side(([sys.executable, "-c", program, DOCTOR.parent], {}))
    assert_named("mpi meeting", printed, code)


@pytest.mark.check
@pytest.mark.parametrize(("variable", "value", "wrong"), [
    ("NCCL", "eth", False), ("NCCL", "=eth", True), ("NCCL", "ib,en", True),
    ("NCCL", "^lo", False), ("NCCL", "^lo,eth,hsn", True),
    ("GLOO", "eth0,hsn0", False), ("GLOO", "eth", True), ("GLOO", "", False)])
def test_how_interfaces_are_named(variable, value, wrong, monkeypatch):
    names = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "hsn0": ["10.1.0.1"]}
    monkeypatch.setattr(doctor, "interfaces", lambda: names)
    for name in "NCCL", "GLOO":
        monkeypatch.setenv(f"{name}_SOCKET_IFNAME", value if name == variable else "")
    assert bool(doctor.wrong_interface()) == wrong


@pytest.mark.check
@pytest.mark.parametrize(("ranks", "key"), [
    ([{"uuids": ["a", "b"], "takes": "a"}, {"uuids": ["a", "b"], "takes": "b"}], None),
    ([{"uuids": ["a", "b"], "takes": "a"}, {"uuids": ["a", "b"], "takes": "a"}], "one GPU"),
    ([{"uuids": ["a"], "takes": "a"}, {"uuids": ["a"], "takes": "a"}], "too many ranks"),
    ([{"uuids": ["a"], "takes": "a"}, {"uuids": ["b"], "takes": "b"}], "ordinal"),
    ([{"driver": True}, {"driver": True}], "no CUDA"),
    ([{"cores": [0]}, {"cores": [0]}], "cores"),
    ([{"node": "nid1", "gloo": ("lo", "127.0.1.1")}, {"node": "nid2"}], "loopback"),
    ([{"failed": "the driver errs"}, {}], "failed")])
def test_facts_of_ranks_are_judged(ranks, key, monkeypatch):
    """None of it needs a GPU or a second node: rank 0 judges what it is handed."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    usual = doctor.examine() | {"driver": False, "cores": [0, 1], "all_cores": 4,
                                "gloo": ("eth0", "10.0.0.1")}
    faults = doctor.diagnose([usual | {"local_rank": rank} | facts
                              for rank, facts in enumerate(ranks)])
    assert list(faults) == ([key] if key else [])
