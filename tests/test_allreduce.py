"""The three all-reduces of chapter 2: their sums, every byte and step that they count, and what bad input gets."""

import json
import os
import re
import sys

import pytest
from conftest import BIN, PROGRAMS, ROOT, execute, lines

RING = ROOT / "02_horovod" / "ring_allreduce.py"
NUMBERS = 1, 3, 1000, 1001  # float32 in a tensor: fewer than ranks, and what 2, 3 and 4 do and do not divide
MISTAKES = [  # flags, with {} for a folder; what the line has to say
    ("--sizes 0", "--sizes: '0'.*above 0"), ("--sizes many", "--sizes: 'many'"), ("--sizes -4", "--sizes"),
    ("--sizes", "--sizes"), ("--sizes 6", "--sizes 6: .*multiple of 4"),
    ("--sizes 4000 40000000000000", "--sizes 40000000000000: does not fit"), ("--repeats 0", "--repeats: '0'.*above 0"),
    ("--results {}/missing/file", "cannot write .*missing/file"),
    ("--size 4000", "unrecognized .*--size 4000")]


def mpiexec(ranks, *words, **options):
    return execute([BIN / "mpiexec", "-n", ranks, sys.executable, *words], timeout=60, **options)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_counted_is_what_is_sent_and_what_the_formulas_say(ranks, tmp_path):
    """The formulas are worked out here from the tensors; the bytes are counted again where torch is handed them."""
    results = tmp_path / "results.jsonl"
    done = mpiexec(ranks, PROGRAMS / "ring_counted.py", RING.parent, "--sizes", *(4 * numbers for numbers in NUMBERS),
                   "--repeats", 1, "--results", results)
    assert done.code == 0, done.err
    assert "all sums: equal" in done.out
    assert ("more ranks than cores" in done.out) == (ranks > os.cpu_count())
    records = {(record["algorithm"], record["bytes"] // 4): record for record in lines(results)}
    assert len(records) == 5 * len(NUMBERS)
    totals = [0] * ranks
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
            totals = [total + own for total, own in zip(totals, sent or [0] * ranks)]
    found = dict(json.loads(line) for line in re.findall(r"^sent: (.*)", done.err, re.M))
    runs = 1 + 2  # the repeat, and what warms up
    assert [sum(found[rank].values()) for rank in range(ranks)] == [runs * total for total in totals]


def test_each_message_of_a_ring_is_a_chunk_for_the_right_neighbour():
    """On four ranks, where left and right differ; noted where torch is handed the messages."""
    ranks = 4
    done = mpiexec(ranks, PROGRAMS / "ring_messages.py", RING.parent, json.dumps(NUMBERS))
    assert done.code == 0, done.err
    found = [json.loads(line) for line in done.out.splitlines()]
    assert sorted(found) == [[rank, numbers, [1 + 2 + 3 + 4], [[(rank + 1) % ranks, 4 * -(-numbers // ranks)]] * 6]
                             for rank in range(ranks) for numbers in NUMBERS]  # 6 = 2(N-1)


def test_mistakes_a_wrong_sum_and_another_type(tmp_path):
    """All in one start: what main() exits with on two ranks, a wrong sum that measure() has to notice, sums in fp64."""
    rows = [flags.format(tmp_path) for flags, _ in MISTAKES]
    done = mpiexec(2, PROGRAMS / "ring_ends.py", RING.parent, json.dumps(rows))
    assert done.code == 0, done.err
    *ends, noticed = json.loads(done.out)
    assert len(ends) == len(MISTAKES) and noticed == "noticed"
    for (_, says), end in zip(MISTAKES, ends):
        assert re.fullmatch(f".*{says}.*", end)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("ranks, flags, says", [
    (None, "", "mpiexec -n 2"), (1, "", "mpiexec -n 2"), (2, "--sizes 4002", "--sizes 4002.*multiple of 4")],
    ids=["without mpiexec", "one rank", "a bad size"])
def test_a_mistake_gets_one_line_and_code_2(ranks, flags, says):
    done = mpiexec(ranks, RING, *flags.split()) if ranks else execute([sys.executable, RING], timeout=60)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"ring_allreduce.py: .*{says}.*\n", done.err)


def test_the_records_are_of_every_size_and_number_of_ranks():
    records = lines(ROOT / "assets" / "records" / "allreduce.jsonl")
    names = "everyone_to_everyone", "reduce_and_broadcast", "ring", "gloo", "mpi"
    for ranks in 2, 3, 4:
        for size in (4096 * 4**k for k in range(8)):
            for name in names:
                found = [record for record in records
                         if (record["ranks"], record["bytes"], record["algorithm"]) == (ranks, size, name)]
                assert len(found) >= 3 and all(record["repeats"] >= 7 and record["cpus"] for record in found)
