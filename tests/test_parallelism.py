"""Data, tensor and pipeline parallelism train alike, with the expected bytes on each rank."""

import re

import pytest
from conftest import ROOT, read_records, run
from tolerances import FP64, assert_close


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ways_train_alike(ranks):
    result = run("03_ddp/three_ways.py", ranks)
    assert (result.code, result.err) == (0, "")
    differences = dict(re.findall(r"(\w+) (\d\.\de[+-]\d+)", result.out))
    assert differences.keys() == {"data", "tensor", "pipeline", "gpipe"}
    for difference in differences.values():
        assert_close("parameters, fp64", float(difference), FP64)


def test_ranks_keep_and_send_what_the_notebook_shows(tmp_path):
    """The record is the notebook's, which compares it with formulae."""
    for way in "data", "tensor", "pipeline":
        result = run("cluster/footprint/__main__.py", 2, "--results", tmp_path / way,
                     ROOT / "03_ddp/three_ways.py", way)
        assert (result.code, result.err) == (0, "")
        expected = [record for record in read_records("three_ways.jsonl")
                    if (record["ranks"], record["flags"]) == (2, [way])]
        for record, other in zip(read_records(tmp_path / way), expected, strict=True):
            assert record["sent"] == other["sent"]
            for name in "parameters", "activations":
                assert record["memory"][name] == other["memory"][name]
