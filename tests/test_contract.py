"""Every main.py: each flag has its effect, and all records have the same fields."""

import pytest
import torch
from conftest import LESSONS, case, numbers, read_records, run_for_record, run_in_one_process
from tolerances import BFLOAT16, assert_close

FIELD_TYPES = {"chapter": str, "ranks": int, "nodes": int, "device": str, "dataset": str,
               "images": int, "image_size": int, "model": str, "parameters": int, "precision": str,
               "batch_size": int, "global_batch_size": int, "seed": int, "steps": int,
               "step_seconds": float, "images_per_second": float, "gradient_bytes": int,
               "peak_memory_bytes": int, "loss": float, "accuracy": float, "test_accuracy": float,
               "total_seconds": float}
FLAGS = ("--device", "cpu", "--dataset", "synthetic", "--image-size", 17, "--model", "resnet18",
         "--precision", "bf16", "--batch-size", 8, "--seed", 3, "--max-steps", 2)
EXPECTED = {"device": "cpu", "dataset": "synthetic", "image_size": 17, "model": "resnet18",
            "parameters": 11_181_642, "precision": "bf16", "batch_size": 8, "seed": 3, "steps": 2}


@pytest.mark.parametrize("chapter", [
    case(name) for name in LESSONS if not name.startswith("05")])
def test_flags_reach_the_record(chapter, tmp_path):
    ranks = 1 if chapter.startswith("01") else 2
    record = run_for_record(chapter, ranks, *FLAGS, folder=tmp_path)
    deepspeed = {"gradient_clipping": float} if chapter == "04_deepspeed" else {}
    assert {name: type(value) for name, value in record.items()} == FIELD_TYPES | deepspeed
    assert record | EXPECTED == record
    assert record["chapter"] == chapter and record["global_batch_size"] == 8 * ranks
    speed = record["global_batch_size"] / record["step_seconds"]
    assert record["images_per_second"] == pytest.approx(speed)
    assert 2 * record["step_seconds"] < record["total_seconds"]  # the median of two is their mean
    width = 2 if chapter == "04_deepspeed" else 4  # in bf16 DeepSpeed casts the model
    assert record["gradient_bytes"] == record["parameters"] * width
    assert record["peak_memory_bytes"] > 0 and 0 <= record["accuracy"] <= 1


def test_epochs_max_steps_and_seed_have_their_effect(tmp_path):
    results = tmp_path / "results"
    rows = "", "--epochs 2", "--max-steps 30", "--max-steps 30", "--max-steps 30 --seed 1"
    rows = [f"{flags} --results {results}" for flags in rows]
    out, _ = run_in_one_process("01_single_node", rows, tmp_path)
    epochs = [run_output.count("images/s") for run_output in out.split("ranks: ")[1:]]
    assert epochs == [5, 2, 2, 2, 2]
    records = read_records(results)  # each is appended
    assert [record["steps"] for record in records] == [110, 44, 30, 30, 30]
    assert records[2]["loss"] == records[3]["loss"] != records[4]["loss"]


@numbers
def test_precision_is_that_of_the_computation(tmp_path):
    """fp64 keeps double parameters; bf16 keeps float parameters and computes in bfloat16."""
    widths = {"fp32": 4, "fp64": 8, "bf16": 4}
    flags = f"--epochs 1 --batch-size 479 --results {tmp_path}/results"
    rows = [f"{flags} --precision {name} --checkpoint {tmp_path}/{name}" for name in widths]
    run_in_one_process("01_single_node", rows, tmp_path)
    losses = {record["precision"]: record["loss"] for record in read_records(tmp_path / "results")}
    for name, width in widths.items():
        tensors = torch.load(tmp_path / name)["model"].values()
        assert {tensor.itemsize for tensor in tensors} == {width}
    rounding = abs(losses["bf16"] / losses["fp32"] - 1)
    assert rounding > 0
    assert_close("loss, bf16, relative", rounding, BFLOAT16)
    assert 0 < abs(losses["fp32"] / losses["fp64"] - 1) < rounding
