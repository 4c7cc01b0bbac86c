"""cluster/predict.py: a scaling table from a run on one GPU."""

import json
import sys

import pandas
import pytest
from conftest import assert_refused, run_command
from tolerances import ARITHMETIC, assert_close

from cluster.predict import model as cost_model

PREDICT = [sys.executable, "-m", "cluster.predict"]
RUN = {"ranks": 1, "nodes": 1, "device": "cuda",
       "global_batch_size": 64, "images": 6400, "step_seconds": 0.2, "gradient_bytes": 100e6}


@pytest.fixture
def table(tmp_path):
    """Return a function (records, *flags) -> the table that predict.py saved."""
    def predict_table(records, *flags):
        path = tmp_path / "run.jsonl"
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        result = run_command([*PREDICT, path, "--csv", tmp_path / "table.csv", *flags])
        assert result.code == 0, result.err
        assert "7 predictions for CosmoFlow with DDP on Polaris: 2.4 to 12.1 times" in result.out
        return pandas.read_csv(tmp_path / "table.csv").set_index("nodes")
    return predict_table


@pytest.mark.check
def test_predictions_for_one_gpu_and_a_slow_link(table):
    """One GPU is as fast as measured; two nodes are no faster than the link allows."""
    rows = table([RUN], "--gpus", 1, "--node-link", 10e6, "--nodes", 1, 2, 512, "--epochs", 9)
    assert_close("one GPU's samples/s", abs(rows["samples/s"][1] / 320 - 1), ARITHMETIC)
    assert_close("one GPU's hours", abs(rows.hours[1] * 3600 / (9 * 6400 / 320) - 1), ARITHMETIC)
    assert rows["samples/s"][2] < 128 / (100e6 / 10e6)
    assert rows.pessimist[2] < rows.efficiency[2] < rows.optimist[2]
    assert list(rows["global batch"]) == [64, 128, 12 * 512]  # never more than the data set


@pytest.mark.check
def test_strong_scaling_uses_the_records_of_smaller_batches(table):
    smaller_run = RUN | {"global_batch_size": 32, "step_seconds": 0.19}
    flags = "--gpus", 2, "--node-link", 1e12, "--nodes", 1, 2, "--largest-batch", 128
    rows = table([smaller_run, RUN], *flags)
    assert list(rows["global batch"]) == [128, 128]
    assert rows["speed-up"][2] < 2.2  # half the batch takes as long
    assert rows.efficiency[2] < rows.computing[2] < 0.55  # so it is not the network's fault
    assert table([RUN], *flags)["speed-up"][2] > 3.5  # no record for the smaller batch


@pytest.mark.check
def test_a_link_is_fitted_to_the_doctors_all_reduces():
    cluster = cost_model.Cluster(4, 2, node_link=3e9, gpu_link=1e12, measured=True)
    records = [{"all_reduce": "NCCL", "bytes": size, "ranks": 8, "nodes": 4,
                "seconds": cost_model.all_reduce_seconds(size, cluster)}
               for size in (0, 2**20, 2**24, 2**28)]
    link, level = cost_model.measured_link(records)
    assert_close("a measured link", abs(link / 3e9 - 1), ARITHMETIC)
    assert_close("a measured level", abs(level / cost_model.CENTRAL.level - 1), ARITHMETIC)


@pytest.mark.fault
@pytest.mark.parametrize(("change", "message"), [
    ({"gradient_bytes": None}, "a line of JSON with nodes, ranks, "),
    ({"step_seconds": "0.2"}, "a line of JSON with nodes, ranks, "),
    ({"images": None}, "--samples N: ")])
def test_an_incomplete_record_gets_one_line(change, message, tmp_path):
    (tmp_path / "run.jsonl").write_text(json.dumps(RUN | change))
    assert_refused(run_command([*PREDICT, tmp_path / "run.jsonl", "--node-link", 1e9]), message)
