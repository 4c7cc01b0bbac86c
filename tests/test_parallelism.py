"""Data, tensor and pipeline parallelism train alike, with the expected bytes on each rank."""

import re

import pytest
from conftest import ROOT, read_records, run
from tolerances import FP64, assert_close

WAYS, MICRO_BATCHES = ("data", "tensor", "pipeline", "gpipe"), 4
BATCH, WIDTH, PIXELS, CLASSES = 64, 256, 64, 10
WEIGHTS = [PIXELS * WIDTH, WIDTH * WIDTH, WIDTH * WIDTH, WIDTH * CLASSES]
BIASES = [WIDTH, WIDTH, WIDTH, CLASSES]


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
def test_all_ways_train_alike(ranks):
    result = run("03_ddp/three_ways.py", ranks)
    assert (result.code, result.err) == (0, "")
    differences = dict(re.findall(r"(\w+) (\d\.\de[+-]\d+)", result.out))
    assert tuple(differences) == WAYS
    for difference in differences.values():
        assert_close("parameters, fp64", float(difference), FP64)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_keep_the_expected_sizes(ranks, tmp_path):
    for way in WAYS:
        result = run("cluster/footprint/__main__.py", ranks, "--results", tmp_path / way,
                     ROOT / "03_ddp/three_ways.py", way)
        assert (result.code, result.err) == (0, "")
        records = read_records(tmp_path / way)
        assert len(records) == ranks
        for record in records:
            sizes = [record["memory"][name] / 8 for name in ("parameters", "activations")]  # fp64
            assert sizes == expected_sizes(way, record["rank"], ranks)
