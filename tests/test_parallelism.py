"""Data, tensor and pipeline parallelism train alike."""

import re

import pytest
from conftest import run
from tolerances import FP64, assert_close

WAYS = "data", "tensor", "pipeline", "gpipe"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ways_train_alike(ranks):
    result = run("03_ddp/three_ways.py", ranks)
    assert (result.code, result.err) == (0, "")
    differences = dict(re.findall(r"(\w+) (\d\.\de[+-]\d+)", result.out))
    assert tuple(differences) == WAYS
    for difference in differences.values():
        assert_close("parameters, fp64", float(difference), FP64)
