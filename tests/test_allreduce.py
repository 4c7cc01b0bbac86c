"""The three all-reduces of chapter 2: sums, counted bytes and steps."""

import re
import sys

import pytest
from conftest import BIN, ROOT, execute, lines

RING = ROOT / "02_horovod" / "pytorch" / "ring_allreduce.py"


def mpiexec(ranks, *words, **options):
    return execute([BIN / "mpiexec", "-n", ranks, sys.executable, *words], timeout=60, **options)


def test_counts_match_the_formulas(tmp_path):
    """On three ranks, so that left and right neighbour differ."""
    results = tmp_path / "results.jsonl"
    padded = {1: 3, 1000: 1002, 1001: 1002}  # numbers in a tensor, and with the ring's zeros
    done = mpiexec(3, RING, "--repeats", 1, "--results", results,
                   "--sizes", *(4 * numbers for numbers in padded))
    assert done.code == 0, done.err
    assert "all sums: equal" in done.out
    records = {(record["algorithm"], record["bytes"] // 4): record for record in lines(results)}
    assert len(records) == 5 * len(padded)
    for numbers in padded:
        size, around = 4 * numbers, 4 * padded[numbers] * 4 // 3
        counts = {"everyone_to_everyone": ([2 * size] * 3, 1),
                  "reduce_and_broadcast": ([2 * size, size, size], 2),
                  "ring": ([around] * 3, 4), "gloo": (None, None), "mpi": (None, None)}
        for name, (sent, steps) in counts.items():
            record = records[name, numbers]
            assert (record["bytes_sent"], record["steps"], record["ranks"]) == (sent, steps, 3)
            assert 0 < record["least"] <= record["seconds"] <= record["most"]


def test_wrong_sum_ends_all_ranks():
    wrong = ("import ring_allreduce as ring; ring.ALGORITHMS = [lambda tensor, network: None]; "
             "ring.run(ring.main)")
    done = mpiexec(2, "-c", wrong, "--sizes", 4000, cwd=RING.parent)
    assert done.code != 0 and "wrong sum on rank" in done.err


@pytest.mark.fault
@pytest.mark.parametrize(("ranks", "flags", "message"), [
    (1, "", "mpiexec -n 2"), (2, "--sizes 4002", "--sizes 4002.*multiple of 4")])
def test_a_mistake_gets_one_line_and_code_2(ranks, flags, message):
    done = mpiexec(ranks, RING, *flags.split())
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"ring_allreduce.py: .*{message}.*\n", done.err)
