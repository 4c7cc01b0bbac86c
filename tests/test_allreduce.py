"""The three all-reduces of chapter 2: their sums, every byte and step that they count, and what a mistake gets."""

import json
import re
import sys

import pytest
from conftest import BIN, PROGRAMS, ROOT, execute, lines

RING = ROOT / "02_horovod" / "pytorch" / "ring_allreduce.py"
NUMBERS = 1, 1000, 1001  # float32 in a tensor: fewer than ranks, and what 3 does not divide, both ways


def mpiexec(ranks, *words, **options):
    return execute([BIN / "mpiexec", "-n", ranks, sys.executable, *words], timeout=60, **options)


def test_what_is_counted_is_what_is_sent_and_what_the_formulas_say(tmp_path):
    """On three ranks, where left and right differ; the bytes are counted again where torch is handed them."""
    ranks, results = 3, tmp_path / "results.jsonl"
    done = mpiexec(ranks, PROGRAMS / "ring_counted.py", RING.parent, "--sizes", *(4 * numbers for numbers in NUMBERS),
                   "--repeats", 1, "--results", results)
    assert done.code == 0, done.err
    assert "all sums: equal" in done.out
    records = {(record["algorithm"], record["bytes"] // 4): record for record in lines(results)}
    assert len(records) == 5 * len(NUMBERS)
    expected = [[0] * ranks for _ in range(ranks)]  # of each rank: what it sends to each
    for numbers in NUMBERS:
        padded = next(length for length in range(numbers, numbers + ranks) if length % ranks == 0)
        everyone = [4 * numbers * (ranks - 1)] * ranks
        from_root = [4 * numbers * (ranks - 1)] + [4 * numbers] * (ranks - 1)
        around = [4 * padded * 2 * (ranks - 1) // ranks] * ranks
        for name, sent, steps in (("everyone_to_everyone", everyone, 1), ("reduce_and_broadcast", from_root, 2),
                                  ("ring", around, 2 * (ranks - 1)), ("gloo", None, None), ("mpi", None, None)):
            record = records[name, numbers]
            assert (record["bytes_sent"], record["steps"], record["ranks"]) == (sent, steps, ranks)
            assert 0 < record["least"] <= record["seconds"] <= record["most"]
        for rank in range(ranks):
            for other in {*range(ranks)} - {rank}:
                expected[rank][other] += 4 * numbers * (2 if 0 in (rank, other) else 1)
            expected[rank][(rank + 1) % ranks] += around[rank]
    runs = 1 + 2  # the repeat, and what warms up
    found = dict(json.loads(line) for line in re.findall(r"^sent: (.*)", done.err, re.M))
    for rank in range(ranks):
        assert [found[rank].get(str(other), 0) for other in range(ranks)] == [runs * sent for sent in expected[rank]]


def test_a_wrong_sum_is_noticed_and_ends_all_ranks():
    wrong = "import ring_allreduce as it; it.ALGORITHMS = [lambda tensor, wire: None]; it.run(it.main)"
    done = mpiexec(2, "-c", wrong, "--sizes", 4000, cwd=RING.parent)
    assert done.code != 0 and "has not gloo's sum" in done.err


@pytest.mark.fault
@pytest.mark.parametrize(("ranks", "flags", "says"), [
    (1, "", "mpiexec -n 2"), (2, "--sizes 4002", "--sizes 4002.*multiple of 4")], ids=["one rank", "a bad size"])
def test_a_mistake_gets_one_line_and_code_2(ranks, flags, says):
    done = mpiexec(ranks, RING, *flags.split())
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"ring_allreduce.py: .*{says}.*\n", done.err)
