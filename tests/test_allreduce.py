"""The three all-reduces of chapter 2: their sums, every byte and step that they count."""

import json
import re
import sys

import pytest
from conftest import BIN, PROGRAMS, ROOT, execute, lines

RING = ROOT / "02_horovod" / "pytorch" / "ring_allreduce.py"


def mpiexec(ranks, *words, **options):
    return execute([BIN / "mpiexec", "-n", ranks, sys.executable, *words], timeout=60, **options)


def test_what_is_counted_is_what_is_sent_and_what_the_formulas_say(tmp_path):
    """On three ranks, left and right differ. Bytes are counted again where torch gets them."""
    results = tmp_path / "results.jsonl"
    padded = {1: 3, 1000: 1002, 1001: 1002}  # numbers in a tensor, and with the ring's zeros
    done = mpiexec(3, PROGRAMS / "ring_counted.py", "--repeats", 1, "--results", results,
                   "--sizes", *(4 * numbers for numbers in padded),
                   env={"PYTHONPATH": str(RING.parent)})
    assert done.code == 0, done.err
    assert "all sums: equal" in done.out
    records = {(record["algorithm"], record["bytes"] // 4): record for record in lines(results)}
    assert len(records) == 5 * len(padded)
    to_others = [[0] * 3 for _ in range(3)]  # bytes of each rank to each other one
    for numbers in padded:
        size, around = 4 * numbers, 4 * padded[numbers] * 4 // 3
        counts = {"everyone_to_everyone": ([2 * size] * 3, 1),
                  "reduce_and_broadcast": ([2 * size, size, size], 2),
                  "ring": ([around] * 3, 4), "gloo": (None, None), "mpi": (None, None)}
        for name, (sent, steps) in counts.items():
            record = records[name, numbers]
            assert (record["bytes_sent"], record["steps"], record["ranks"]) == (sent, steps, 3)
            assert 0 < record["least"] <= record["seconds"] <= record["most"]
        for rank in range(3):
            right, left = (rank + 1) % 3, (rank + 2) % 3
            for other in right, left:
                to_others[rank][other] += size * (2 if 0 in (rank, other) else 1)
            to_others[rank][right] += around
    runs = 1 + 2  # the repeat, and the warm-up
    counted = dict(json.loads(line) for line in re.findall(r"^sent: (.*)", done.err, re.M))
    for rank in range(3):
        expected = {str(other): runs * size for other, size in enumerate(to_others[rank]) if size}
        assert counted[rank] == expected


def test_a_wrong_sum_is_noticed_and_ends_all_ranks():
    wrong = ("import ring_allreduce as ring; ring.ALGORITHMS = [lambda tensor, wire: None]; "
             "ring.run(ring.main)")
    done = mpiexec(2, "-c", wrong, "--sizes", 4000, cwd=RING.parent)
    assert done.code != 0 and "has not gloo's sum" in done.err


@pytest.mark.fault
@pytest.mark.parametrize(("ranks", "flags", "message"), [
    (1, "", "mpiexec -n 2"), (2, "--sizes 4002", "--sizes 4002.*multiple of 4")])
def test_a_mistake_gets_one_line_and_code_2(ranks, flags, message):
    done = mpiexec(ranks, RING, *flags.split())
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"ring_allreduce.py: .*{message}.*\n", done.err)
