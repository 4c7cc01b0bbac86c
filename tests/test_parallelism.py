"""Data, tensor and pipeline parallel are the training of one process; each holds and sends what the formulae say."""

import json
import sys

import pytest
from conftest import BIN, PROGRAMS, ROOT, copy_of, execute, lines
from tolerances import FP64, close

WAYS, MICRO_BATCHES = ("data", "tensor", "pipeline", "gpipe"), 4
BATCH, WIDTH, PIXELS, CLASSES, STEPS = 64, 256, 64, 10, 1797 // 64
BYTES = 8  # of a number in fp64, and of a label
WEIGHTS = [PIXELS * WIDTH, WIDTH * WIDTH, WIDTH * WIDTH, WIDTH * CLASSES]
BIASES = [WIDTH, WIDTH, WIDTH, CLASSES]
LAYERS = [BYTES * (weights + biases) for weights, biases in zip(WEIGHTS, BIASES)]
HIDDEN, LOGITS, MEAN = BYTES * WIDTH, BYTES * CLASSES, BYTES  # of an image after a layer, at the end; of the loss


def start(ranks, *words):
    return execute([BIN / "mpiexec", "-n", ranks, sys.executable, *words], cwd=ROOT / "03_ddp", timeout=120)


def steady(record):
    """What each step sends from the third on: the pipeline's first agrees on shapes, DDP's second on buckets."""
    steps = {json.dumps(step) for step in record["sent"][2:]}
    assert len(record["sent"]) == STEPS and len(steps) == 1
    return json.loads(steps.pop())


def holds(way, rank, ranks):
    """Bytes of parameters and of activations that a rank holds."""
    if way == "data":
        return [sum(LAYERS), BATCH // ranks * (3 * HIDDEN + LOGITS) + MEAN]
    if way == "tensor":  # the biases of the layers split by rows are whole on every rank, as are their outputs
        parameters = BYTES * ((sum(WEIGHTS) + BIASES[0] + BIASES[2]) // ranks + BIASES[1] + BIASES[3])
        return [parameters, BATCH * (2 * HIDDEN // ranks + HIDDEN + LOGITS) + MEAN]
    # a stage keeps what its ReLUs give and, but for the first, what it gets; the last also what its loss needs
    layers, size, last = 4 // ranks, BATCH // MICRO_BATCHES, rank == ranks - 1
    kept = size * HIDDEN * (layers + (rank > 0) - last) + (size * LOGITS + MEAN) * last
    in_flight = MICRO_BATCHES if way == "gpipe" else ranks - rank  # 1F1B: as many as there are stages to the end
    return [sum(LAYERS[layers * rank:layers * (rank + 1)]), kept * in_flight]


def sends(way, rank, ranks):
    if way == "tensor":  # forward, forward, backward; the images need no gradient
        return [["all-reduce", BATCH * size] for size in (HIDDEN, LOGITS, HIDDEN)]
    return [["send", BATCH // MICRO_BATCHES * HIDDEN]] * (MICRO_BATCHES * ((rank > 0) + (rank < ranks - 1)))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_three_ways_are_one_training_and_hold_and_send_their_bytes(ranks, tmp_path):
    done = start(ranks, PROGRAMS / "ways_on_the_wire.py", tmp_path, *WAYS, "--results", tmp_path / "results")
    assert (done.code, done.err) == (0, "")
    alone, *records = lines(tmp_path / "results")
    assert [alone["parameters"], alone["activations"]] == holds("data", 0, 1) and alone["sent"] == [[]] * STEPS
    assert [(record["way"], record["rank"]) for record in records] == [(way, r) for way in WAYS for r in range(ranks)]
    for record in records:
        way, rank = record["way"], record["rank"]
        close("parameters, fp64", record["difference"], FP64)
        assert [record["parameters"], record["activations"]] == holds(way, rank, ranks)
        if way == "data":
            assert {kind for kind, _ in steady(record)} == {"all-reduce"}
            assert sum(size for _, size in steady(record)) == sum(LAYERS)
        else:
            assert steady(record) == sends(way, rank, ranks)
        counted = sum(size * (2 * (ranks - 1) / ranks if kind == "all-reduce" else 1)
                      for step in record["sent"] for kind, size in step)
        wire = json.loads((tmp_path / f"wire-{rank}").read_text())[way]
        assert 0.99 * counted < wire < 1.05 * counted, (way, rank, wire, counted)  # headers, and what TCP repeats


def test_a_training_that_differs_is_noticed(tmp_path):
    """Data parallel without DDP: each rank trains on its own images."""
    changed = copy_of("03_ddp", tmp_path, ("cross_entropy(ddp(images)", "cross_entropy(network(images)"),
                      name="three_ways.py")
    done = start(2, changed, "data")
    assert done.code == 2 and done.err == "three_ways.py: not the training of one process: data\n", done.err
