"""Data, tensor and pipeline parallel are the training of one process; each holds and sends what the formulae say."""

import json
import re
import sys
from itertools import accumulate

import pytest
from conftest import BIN, PROGRAMS, ROOT, copy_of, execute, in_one_process, lines
from tolerances import FP64, close

CHAPTER = ROOT / "03_ddp"
WAYS, MICRO_BATCHES = ("data", "tensor", "pipeline", "gpipe"), 4
BATCH, WIDTH, PIXELS, CLASSES, STEPS = 64, 256, 64, 10, 1797 // 64
BYTES = 8  # of a number in fp64, and of a label
WEIGHTS = [PIXELS * WIDTH, WIDTH * WIDTH, WIDTH * WIDTH, WIDTH * CLASSES]
BIASES = [WIDTH, WIDTH, WIDTH, CLASSES]
LAYERS = [BYTES * (weights + biases) for weights, biases in zip(WEIGHTS, BIASES)]
HIDDEN, LOGITS, MEAN = BYTES * WIDTH, BYTES * CLASSES, BYTES  # of an image after a layer, at the end; of the loss


def start(ranks, *words, main=("three_ways.py",)):
    return execute([BIN / "mpiexec", "-n", ranks, sys.executable, *main, *words], cwd=CHAPTER, timeout=120)


def by_way(path):
    """{way: its records in the order of the ranks}."""
    records = lines(path)
    return {way: [record for record in records if record["way"] == way] for way in {r["way"] for r in records}}


def held(record):
    return tuple(record[name] for name in ("parameters", "activations", "images", "labels"))


def steady(record):
    """What each step sends from the third on: the pipeline's first agrees on shapes, DDP's second on buckets."""
    steps = {json.dumps(step) for step in record["sent"][2:]}
    assert len(record["sent"]) == STEPS and len(steps) == 1
    return json.loads(steps.pop())


def expected_data(ranks):
    return [(sum(LAYERS), BATCH // ranks * (3 * HIDDEN + LOGITS) + MEAN, BATCH * PIXELS * BYTES // ranks,
             BATCH * BYTES // ranks)] * ranks


def expected_tensor(ranks):
    """The biases of the layers split by rows are whole on every rank, as are their outputs."""
    parameters = BYTES * ((sum(WEIGHTS) + BIASES[0] + BIASES[2]) // ranks + BIASES[1] + BIASES[3])
    activations = BATCH * (2 * HIDDEN // ranks + HIDDEN + LOGITS) + MEAN
    return [(parameters, activations, BATCH * PIXELS * BYTES, BATCH * BYTES)] * ranks


def expected_pipeline(way, ranks):
    """A stage keeps what its ReLUs give, and, but for the first, what it gets; the last one also what its loss needs.

    1F1B: for as many micro-batches as there are stages from this one to the end; GPipe: for all.
    """
    expected, layers, size = [], 4 // ranks, BATCH // MICRO_BATCHES
    for rank in range(ranks):
        last = rank == ranks - 1
        kept = size * HIDDEN * (layers + (rank > 0) - last) + (size * LOGITS + MEAN) * last
        expected.append((sum(LAYERS[layers * rank:layers * (rank + 1)]), kept * in_flight(way, rank, ranks),
                         BATCH * PIXELS * BYTES * (rank == 0), BATCH * BYTES * last))
    return expected


def in_flight(way, rank, ranks):
    return MICRO_BATCHES if way == "gpipe" else ranks - rank


@pytest.mark.parametrize("ranks", [2, 4])
def test_three_ways_are_one_training_and_hold_and_send_their_bytes(ranks, tmp_path):
    done = start(ranks, *WAYS, "--results", tmp_path / "results", main=(PROGRAMS / "ways_on_the_wire.py", tmp_path))
    assert (done.code, done.err) == (0, "")
    found = by_way(tmp_path / "results")
    alone, = found.pop("alone")
    assert held(alone) == (sum(LAYERS), BATCH * (3 * HIDDEN + LOGITS) + MEAN, BATCH * PIXELS * BYTES, BATCH * BYTES)
    assert alone["sent"] == [[]] * STEPS
    close("parameters, fp64", max(record["difference"] for records in found.values() for record in records), FP64)
    assert [held(record) for record in found["data"]] == expected_data(ranks)
    assert [held(record) for record in found["tensor"]] == expected_tensor(ranks)
    for record in found["data"]:
        assert sum(size for _, size in steady(record)) == sum(LAYERS)
        assert {kind for kind, _ in steady(record)} == {"all-reduce"}
        assert ["broadcast", sum(LAYERS)] in record["start"]
    for record in found["tensor"]:  # forward, forward, backward; the images need no gradient
        assert steady(record) == [["all-reduce", BATCH * size] for size in (HIDDEN, LOGITS, HIDDEN)]
    for way in ("pipeline", "gpipe"):
        assert [held(record) for record in found[way]] == expected_pipeline(way, ranks)
        for rank, record in enumerate(found[way]):
            neighbours = (rank > 0) + (rank < ranks - 1)
            assert steady(record) == [["send", BATCH // MICRO_BATCHES * HIDDEN]] * (MICRO_BATCHES * neighbours)
            alive = list(accumulate(1 if kind == "forward" else -1 for kind, _ in record["events"]))
            assert max(alive) == in_flight(way, rank, ranks) and alive[-1] == 0
            for each in ("forward", "backward"):
                assert [number for kind, number in record["events"] if kind == each] == [*range(MICRO_BATCHES)]

    for way, records in found.items():
        for rank, record in enumerate(records):
            counted = sum(size * (2 * (ranks - 1) / ranks if kind == "all-reduce" else 1)
                          for step in record["sent"] for kind, size in step)
            wire = json.loads((tmp_path / f"wire-{rank}").read_text())[way]
            assert 0.99 * counted < wire < 1.05 * counted, (way, rank, wire, counted)  # headers, and what TCP repeats


def test_a_training_that_differs_is_noticed(tmp_path):
    """Data parallel without DDP: each rank trains on its own images."""
    changed = copy_of("03_ddp", tmp_path, ("cross_entropy(ddp(images)", "cross_entropy(network(images)"),
                      name="three_ways.py")
    done = start(2, "data", main=(changed,))
    assert done.code == 2 and done.err == "three_ways.py: not the training of one process: data\n", done.err


def test_mistakes_are_one_line(tmp_path):
    cases = {"": "2 or 4 ranks, not 1: mpiexec", "zero": "zero: the ways are data, tensor, pipeline, gpipe",
             "--batch-size 1800": "--batch-size.*1797", "--batch-size 30": "multiples of 4",
             "--width 30": "multiples of 4", "--micro-batches 5": "--micro-batches.*divisor",
             "--schedule gpipe": "--schedule", "--batch-size none": "none.*above 0",
             f"--results {tmp_path}": "cannot write"}
    _, answers = in_one_process("03_ddp/three_ways.py", list(cases), cwd=CHAPTER)
    for answer, said in zip(answers, cases.values()):
        assert "\n" not in answer and re.search(said, answer), answer


def test_a_wrong_number_of_ranks_ends_with_2_and_one_line():
    done = start(3, "pipeline")
    line = "three_ways.py: .*2 or 4 ranks, not 3.*the 4 layers evenly.*\n"
    assert done.code == 2 and re.fullmatch(line, done.err), done.err
