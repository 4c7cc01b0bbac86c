"""Every main.py: each flag does what it says, and the record has one form."""

import pytest
import torch
from conftest import LESSONS, case, in_one_process, lines, numbers, record
from tolerances import BFLOAT16, close

RECORD = {"chapter": str, "ranks": int, "nodes": int, "device": str, "dataset": str,
          "images": int, "image_size": int, "model": str, "parameters": int, "precision": str,
          "batch_size": int, "global_batch_size": int, "seed": int, "steps": int,
          "step_seconds": float, "images_per_second": float, "gradient_bytes": int,
          "peak_memory_bytes": int, "loss": float, "accuracy": float, "test_accuracy": float,
          "total_seconds": float}
FLAGS = ("--device", "cpu", "--dataset", "synthetic", "--image-size", 17, "--model", "resnet18",
         "--precision", "bf16", "--batch-size", 8, "--seed", 3, "--max-steps", 2)
RECORDED = {"device": "cpu", "dataset": "synthetic", "image_size": 17, "model": "resnet18",
            "parameters": 11_181_642, "precision": "bf16", "batch_size": 8, "seed": 3, "steps": 2}


@pytest.mark.parametrize("chapter", [
    case(name, marks=[pytest.mark.slow] if "import tensorflow" in path.read_text() else [])
    for name, path in LESSONS.items() if not name.startswith("05")])
def test_flags_reach_the_record(chapter, tmp_path):
    ranks = 1 if chapter.startswith("01") else 2
    # TensorFlow asks the CPU whether oneDNN has bf16, oneDNN asks DNNL_MAX_CPU_ISA: without oneDNN
    # test-cpus cannot set them at odds.
    result = record(chapter, ranks, *FLAGS, folder=tmp_path, env={"TF_ENABLE_ONEDNN_OPTS": "0"})
    deepspeed = {"gradient_clipping": float} if chapter == "04_deepspeed" else {}
    assert {name: type(value) for name, value in result.items()} == RECORD | deepspeed
    assert result | RECORDED == result
    assert result["chapter"] == chapter and result["global_batch_size"] == 8 * ranks
    speed = result["global_batch_size"] / result["step_seconds"]
    assert result["images_per_second"] == pytest.approx(speed)
    assert 2 * result["step_seconds"] < 3 * result["total_seconds"]
    width = 2 if chapter == "04_deepspeed" else 4  # in bf16 DeepSpeed casts the model
    assert result["gradient_bytes"] == result["parameters"] * width
    assert result["peak_memory_bytes"] > 0 and 0 <= result["accuracy"] <= 1


def test_epochs_max_steps_and_seed(tmp_path):
    results = tmp_path / "results"
    rows = "", "--epochs 2", "--max-steps 30", "--max-steps 30", "--max-steps 30 --seed 1"
    out, _ = in_one_process("01_single_node", [f"{flags} --results {results}" for flags in rows])
    assert [part.count("images/s") for part in out.split("ranks: ")[1:]] == [5, 2, 2, 2, 2]
    records = lines(results)  # each is appended
    assert [record["steps"] for record in records] == [110, 44, 30, 30, 30]
    assert records[2]["loss"] == records[3]["loss"] != records[4]["loss"]


@numbers
def test_precision_is_that_of_the_computation(tmp_path):
    """fp64 keeps double parameters; bf16 keeps float parameters and computes in bfloat16."""
    widths = {"fp32": 4, "fp64": 8, "bf16": 4}
    flags = f"--epochs 1 --batch-size 479 --results {tmp_path}/results"
    in_one_process("01_single_node", [f"{flags} --precision {name} --checkpoint {tmp_path}/{name}"
                                      for name in widths])
    losses = {result["precision"]: result["loss"] for result in lines(tmp_path / "results")}
    for name, width in widths.items():
        saved = torch.load(tmp_path / name)["model"].values()
        assert {tensor.itemsize for tensor in saved} == {width}
    rounding = abs(losses["bf16"] / losses["fp32"] - 1)
    assert rounding > 0
    close("loss, bf16, relative", rounding, BFLOAT16)
    assert 0 < abs(losses["fp32"] / losses["fp64"] - 1) < rounding
