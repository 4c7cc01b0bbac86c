"""Data, tensor and pipeline parallelism train alike, with the expected bytes on each rank."""

import sys

import pytest
from conftest import BIN, ROOT, read_records, run_command
from tolerances import FP64, assert_close

WAYS, MICRO_BATCHES = ("data", "tensor", "pipeline", "gpipe"), 4
BATCH, WIDTH, PIXELS, CLASSES = 64, 256, 64, 10
WEIGHTS = [PIXELS * WIDTH, WIDTH * WIDTH, WIDTH * WIDTH, WIDTH * CLASSES]
BIASES = [WIDTH, WIDTH, WIDTH, CLASSES]


def run_ranks(ranks, *arguments):
    command = [BIN / "mpiexec", "-n", ranks, sys.executable, *arguments]
    return run_command(command, cwd=ROOT / "03_ddp")


def expected_sizes(way, rank, ranks):
    """Return the numbers of parameters and of stored activations on a rank."""
    if way == "data":
        return [sum(WEIGHTS + BIASES), BATCH // ranks * (3 * WIDTH + CLASSES) + 1]  # 1: the loss
    if way == "tensor":  # of a layer split by rows, each rank has all biases and outputs
        parameters = (sum(WEIGHTS) + BIASES[0] + BIASES[2]) // ranks + BIASES[1] + BIASES[3]
        return [parameters, BATCH * (2 * WIDTH // ranks + WIDTH + CLASSES) + 1]
    # A stage stores its ReLUs' outputs and, except for the first, its input; the last has the loss.
    layers, images = 4 // ranks, BATCH // MICRO_BATCHES
    inputs = 1 if rank > 0 else 0
    if rank < ranks - 1:
        activations = images * WIDTH * (layers + inputs)
    else:
        activations = images * WIDTH * (layers + inputs - 1) + images * CLASSES + 1
    in_flight = MICRO_BATCHES if way == "gpipe" else ranks - rank  # 1F1B: the stages to the end
    stage = slice(layers * rank, layers * (rank + 1))
    return [sum(WEIGHTS[stage] + BIASES[stage]), activations * in_flight]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ways_train_alike_with_the_expected_sizes(ranks, tmp_path):
    flags = [*WAYS, "--results", tmp_path / "results"]
    result = run_ranks(ranks, "three_ways.py", *flags)
    assert (result.code, result.err) == (0, "")
    _, *records = read_records(tmp_path / "results")
    assert len(records) == ranks * len(WAYS)
    for record in records:
        way, rank = record["way"], record["rank"]
        assert_close("parameters, fp64", record["difference"], FP64)
        sizes = [record["parameters"] / 8, record["activations"] / 8]  # fp64 has 8 bytes
        assert sizes == expected_sizes(way, rank, ranks)
