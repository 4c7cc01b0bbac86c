"""The all-reduces of chapter 3: sums, counted bytes and steps."""

import pytest
from conftest import assert_refused, read_records, run

RING = "03_ddp/ring_allreduce.py"


def test_bytes_and_steps_match_the_formulas(tmp_path):
    """On three ranks, so that left and right neighbour differ."""
    results = tmp_path / "results.jsonl"
    chunk_lengths = {1: [1, 0, 0], 1000: [334, 333, 333], 1001: [334, 334, 333]}  # by elements
    result = run(RING, 3, "--repeats", 1, "--results", results, "--sizes",
                 *(4 * elements for elements in chunk_lengths), launcher=True, timeout=60)
    assert result.code == 0, result.err
    assert "all sums: equal" in result.out
    records = {(record["algorithm"], record["bytes"] // 4): record
               for record in read_records(results)}
    assert len(records) == 5 * len(chunk_lengths)
    for elements, lengths in chunk_lengths.items():
        size, ring_bytes = 4 * elements, [4 * (elements + length) for length in lengths]
        expected = {"everyone_to_everyone": ([2 * size] * 3, 1),
                    "reduce_and_broadcast": ([2 * size, size, size], 2),
                    "ring": (ring_bytes, 4), "gloo": (None, None), "mpi": (None, None)}
        for name, (bytes_sent, steps) in expected.items():
            record = records[name, elements]
            assert (record["bytes_sent"], record["steps"]) == (bytes_sent, steps)
            assert record["ranks"] == 3
            assert 0 < record["least"] <= record["seconds"] <= record["most"]


@pytest.mark.fault
@pytest.mark.parametrize(("ranks", "flags", "message"), [
    (1, "", "mpiexec -n 2"), (2, "--sizes 4002", "--sizes: use multiples of 4")])
def test_mistakes_get_one_line_and_exit_code_2(ranks, flags, message):
    assert_refused(run(RING, ranks, *flags.split(), launcher=True, timeout=60), message)
