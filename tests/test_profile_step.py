"""A training step under the profiler: what each rank records, and what is read from Horovod's timeline."""

import sys

import pytest
from conftest import BIN, ROOT, case, execute, lines


@pytest.mark.slow
@pytest.mark.parametrize("chapter", [case("03_ddp"), case("02_horovod/pytorch")])
def test_every_rank_records_its_steps(chapter, tmp_path):
    done = execute([BIN / "mpiexec", "-n", 2, sys.executable, "-m", "tools.measuring.profile_step",
                    f"{chapter}/main.py", "--results", tmp_path / "step.jsonl"], cwd=ROOT)
    assert done.code == 0, done.err
    records = sorted(lines(tmp_path / "step.jsonl"), key=lambda record: record["rank"])
    assert [(record["chapter"], record["rank"]) for record in records] == [(chapter, 0), (chapter, 1)]
    for record in records:
        assert len(record["steps"]) == 16 - 5 - 1  # without what warms up; the last has no next one, which ends it
        for step in record["steps"]:
            kinds = [what for what, *_ in step]
            sends = "ddp" in chapter or record["rank"] == 0  # rank 0 writes Horovod's timeline for all
            assert kinds[:2] == ["forward", "backward"] and kinds[-1] == "optimizer" and len(kinds) > 3 * sends
            assert set(kinds[2:-1]) == ({"all-reduce"} if sends else set())
            starts = [start for _, start, _ in step]
            assert starts == sorted(starts) and all(start <= end for _, start, end in step)
