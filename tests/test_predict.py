"""submit/predict.py: a scaling table from a one-GPU run, and the run that agree.py times."""

import json
import os
import sys

import forked
import pandas
import pytest
from conftest import ROOT, copy_of, environment, execute
from test_agree import AGREE, QUICK
from test_cost_model import model
from tolerances import ARITHMETIC, close

PREDICT = [sys.executable, ROOT / "submit" / "predict.py"]
RUN = {"chapter": "mine.py", "ranks": 1, "nodes": 1, "device": "cuda",
       "global_batch_size": 64, "images": 6400, "step_seconds": 0.2, "gradient_bytes": 100e6}


@pytest.fixture
def table(tmp_path):
    """Return a function (records, *flags) -> the table that predict.py saved."""
    def predict_table(records, *flags):
        path = tmp_path / "run.jsonl"
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        done = execute([*PREDICT, path, "--csv", tmp_path / "table.csv", *flags])
        assert done.code == 0, done.err
        assert "7 predictions for published runs over a network: median error" in done.out
        return pandas.read_csv(tmp_path / "table.csv").set_index("nodes")
    return predict_table


@pytest.mark.check
def test_one_gpu_and_a_slow_link(table, tmp_path):
    """One GPU is as fast as measured; two nodes are no faster than bytes and link allow."""
    rows = table([RUN], "--gpus", 1, "--node-link", 10e6, "--nodes", 1, 2, 512, "--epochs", 9,
                 "--figure", tmp_path / "scaling.png")
    close("one GPU's samples/s", abs(rows["samples/s"][1] / 320 - 1), ARITHMETIC)
    close("one GPU's hours", abs(rows.hours[1] * 3600 / (9 * 6400 / 320) - 1), ARITHMETIC)
    assert rows["samples/s"][2] < 128 / (100e6 / 10e6)
    assert rows.pessimist[2] < rows.efficiency[2] < rows.optimist[2]
    assert list(rows["global batch"]) == [64, 128, 12 * 512]  # never more than the data set
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.check
def test_strong_scaling_takes_the_time_of_smaller_batches(table):
    smaller = RUN | {"global_batch_size": 32, "step_seconds": 0.19}
    flags = "--gpus", 2, "--node-link", 1e12, "--nodes", 1, 2, "--strong"
    assert list(table([smaller, RUN], *flags)["global batch"]) == [128, 128]
    assert table([smaller, RUN], *flags)["speed-up"][2] < 2.2  # half the batch takes as long
    assert table([RUN], *flags)["speed-up"][2] > 3.5  # no record for the smaller batch


@pytest.mark.check
def test_a_link_that_the_doctor_measured():
    cluster = model.Cluster(4, 2, node_link=3e9, gpu_link=1e12, measured=True)
    records = [{"all_reduce": "NCCL", "bytes": size, "ranks": 8, "nodes": 4,
                "seconds": model.all_reduce_seconds(size, cluster)}
               for size in (0, 2**20, 2**24, 2**28)]
    link, level = model.measured_link(records)
    close("a measured link", abs(link / 3e9 - 1), ARITHMETIC)
    close("a measured level", abs(level / model.CENTRAL.level - 1), ARITHMETIC)


def test_run_of_an_unconverted_script(tmp_path):
    """Its record has the batch size, the data set's size and the gradients' bytes."""
    script = copy_of("03_ddp", tmp_path, ("num_workers=2", "num_workers=0"), name="your_script.py")
    results = tmp_path / "run.jsonl"
    done = forked.run([AGREE, "--results", results, "--steps", 9, script], 1, environment())
    record = json.loads(results.read_text())
    assert done.code == 0 and "9 steps on one rank, cpu: " in done.err, done.err
    assert (record["batch_size"], record["images"], record["steps"]) == (64, 1437, 9)
    assert record["gradient_bytes"] == 4 * (16 * 9 + 16 + 576 * 64 + 64 + 64 * 10 + 10)
    assert 0 < record["step_seconds"] < 10


@pytest.mark.fault
def test_several_ranks_are_not_timed(tmp_path):
    script = copy_of("03_ddp", tmp_path, QUICK, name="your_script_ddp.py")
    done = forked.run([AGREE, "--results", os.devnull, script], 2, environment())
    assert done.code and "is measured on one rank" in done.err, done.err
