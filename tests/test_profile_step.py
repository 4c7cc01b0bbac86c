"""A training step under the profiler: what each rank records, and what is read from Horovod's timeline."""

import json
import sys

import pytest
from conftest import BIN, ROOT, case, execute, lines

from tools.measuring import profile_step


@pytest.mark.parametrize("chapter", [case("03_ddp"), case("02_horovod/pytorch")])
def test_every_rank_records_its_steps(chapter, tmp_path):
    done = execute([BIN / "mpiexec", "-n", 2, sys.executable, "-m", "tools.measuring.profile_step",
                    f"{chapter}/main.py", "--results", tmp_path / "step.jsonl"], cwd=ROOT)
    assert done.code == 0, done.err
    records = sorted(lines(tmp_path / "step.jsonl"), key=lambda record: record["rank"])
    assert [(record["chapter"], record["rank"]) for record in records] == [(chapter, 0), (chapter, 1)]
    for record in records:
        assert len(record["steps"]) == 16 - profile_step.WARM_UP - 1  # the last has no next one, which ends it
        for step in record["steps"]:
            kinds = [what for what, *_ in step]
            sends = "ddp" in chapter or record["rank"] == 0  # rank 0 writes Horovod's timeline for all
            assert kinds[:2] == ["forward", "backward"] and kinds[-1] == "optimizer" and len(kinds) > 3 * sends
            assert set(kinds[2:-1]) == ({"all-reduce"} if sends else set())
            starts = [start for _, start, _ in step]
            assert starts == sorted(starts) and all(start <= end for _, start, end in step)
    first = [record["steps"][0][0][1] for record in records]
    assert abs(first[0] - first[1]) < 1e6  # microseconds of one clock


def test_horovod_s_timeline_gives_each_fused_all_reduce_once(tmp_path):
    def phase(pid, name, start, end):
        return [{"ph": "B", "name": name, "ts": start, "pid": pid}, {"ph": "E", "ts": end, "pid": pid}]

    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1000}},
              *phase(1, "NEGOTIATE_ALLREDUCE", 0, 4), {"ph": "B", "name": "ALLREDUCE", "ts": 5, "pid": 1},
              *phase(1, "MEMCPY_IN_FUSION_BUFFER", 5, 6), *phase(1, "MPI_ALLREDUCE", 6, 9),
              {"ph": "E", "ts": 9, "pid": 1}, *phase(2, "MPI_ALLREDUCE", 6, 10), *phase(2, "MPI_ALLREDUCE", 20, 22),
              *phase(3, "MPI_ALLGATHER", 30, 31)]
    path = tmp_path / "timeline.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + ",\n")  # as it is left: without an end
    assert profile_step.timeline(path) == [(1006, 1010), (1020, 1022)]


def test_a_mistake_is_one_line_from_one_rank(tmp_path):
    bad = tmp_path / "no" / "x"
    for words in ["nowhere.py", "--results", tmp_path / "x"], ["03_ddp/main.py", "--results", bad], []:
        profiler = "-m", "tools.measuring.profile_step"
        done = execute([BIN / "mpiexec", "-n", 2, sys.executable, *profiler, *words], cwd=ROOT)
        assert done.code == 2 and len(done.err.splitlines()) == 1, done.err
