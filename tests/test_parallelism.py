"""Data, tensor and pipeline parallelism are the same training and hold the expected bytes."""

import re
import sys

import pytest
from conftest import BIN, ROOT, copy_of, execute, lines
from tolerances import FP64, close

WAYS, MICRO_BATCHES = ("data", "tensor", "pipeline", "gpipe"), 4
BATCH, WIDTH, PIXELS, CLASSES = 64, 256, 64, 10
WEIGHTS = [PIXELS * WIDTH, WIDTH * WIDTH, WIDTH * WIDTH, WIDTH * CLASSES]
BIASES = [WIDTH, WIDTH, WIDTH, CLASSES]


def start(ranks, *words):
    return execute([BIN / "mpiexec", "-n", ranks, sys.executable, *words], cwd=ROOT / "03_ddp")


def expected_sizes(way, rank, ranks):
    """Return the numbers of parameters and activations that a rank holds."""
    if way == "data":
        return [sum(WEIGHTS + BIASES), BATCH // ranks * (3 * WIDTH + CLASSES) + 1]  # 1: the loss
    if way == "tensor":  # layers split by rows have whole biases and outputs on every rank
        parameters = (sum(WEIGHTS) + BIASES[0] + BIASES[2]) // ranks + BIASES[1] + BIASES[3]
        return [parameters, BATCH * (2 * WIDTH // ranks + WIDTH + CLASSES) + 1]
    # A stage keeps its ReLUs' outputs and, except for the first, its input; the last has the loss.
    layers, size = 4 // ranks, BATCH // MICRO_BATCHES
    inputs_kept = 1 if rank > 0 else 0
    if rank < ranks - 1:
        kept = size * WIDTH * (layers + inputs_kept)
    else:
        kept = size * WIDTH * (layers + inputs_kept - 1) + size * CLASSES + 1
    in_flight = MICRO_BATCHES if way == "gpipe" else ranks - rank  # 1F1B: the stages to the end
    part = slice(layers * rank, layers * (rank + 1))
    return [sum(WEIGHTS[part] + BIASES[part]), kept * in_flight]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_three_ways_are_one_training_and_hold_their_bytes(ranks, tmp_path):
    flags = [*WAYS, "--results", tmp_path / "results"]
    done = start(ranks, "three_ways.py", *flags)
    assert (done.code, done.err) == (0, "")
    _, *records = lines(tmp_path / "results")
    assert len(records) == ranks * len(WAYS)
    for record in records:
        way, rank = record["way"], record["rank"]
        close("parameters, fp64", record["difference"], FP64)
        numbers = [record["parameters"] / 8, record["activations"] / 8]  # fp64 has 8 bytes
        assert numbers == expected_sizes(way, rank, ranks)


def test_a_different_training_is_detected(tmp_path):
    """Data parallel without DDP: each rank trains on its own images."""
    changed = copy_of("03_ddp", tmp_path, ("cross_entropy(ddp(images)",
                      "cross_entropy(network(images)"), name="three_ways.py")
    done = start(2, changed, "data")
    assert done.code == 2
    assert re.fullmatch(r"three_ways.py: .*training differs from one process: data\n", done.err)
