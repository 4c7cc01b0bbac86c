"""Every main.py: each flag does what it says, and the record has one form."""

import sys

import numpy as np
import pytest
import torch
from conftest import (
    ON,
    PROGRAMS,
    ROOT,
    case,
    execute,
    in_one_process,
    lines,
    load_module,
    numbers,
    observe,
    parameters,
    record,
)
from sklearn.datasets import load_digits
from tolerances import BFLOAT16, FP64, close

RECORD = {"chapter": str, "ranks": int, "nodes": int, "device": str, "dataset": str, "image_size": int, "model": str,
          "parameters": int, "precision": str, "batch_size": int, "global_batch_size": int, "seed": int, "steps": int,
          "step_seconds": float, "images_per_second": float, "gradient_bytes": int, "peak_memory_bytes": int,
          "loss": float, "accuracy": float, "test_accuracy": float, "total_seconds": float}


def check(found):
    """The record has exactly these names, with values of the right type that are possible and agree."""
    assert {name: type(value) for name, value in found.items()} == RECORD
    assert all(value > 0 for name, value in found.items()
               if RECORD[name] is not str and name not in ("seed", "accuracy", "test_accuracy")), found
    assert 0 <= found["accuracy"] <= 1 and 0 <= found["test_accuracy"] <= 1
    assert found["global_batch_size"] == found["ranks"] * found["batch_size"]
    assert found["images_per_second"] == pytest.approx(found["global_batch_size"] / found["step_seconds"])
    half = found["precision"] == "bf16" and found["chapter"] in ("04_deepspeed", "05_zero")  # DeepSpeed casts the model
    assert found["gradient_bytes"] == found["parameters"] * (2 if half else 8 if found["precision"] == "fp64" else 4)
    assert found["step_seconds"] * found["steps"] < 3 * found["total_seconds"]
    return found


FLAGS = "--device cpu --dataset synthetic --image-size 17 --model resnet18 --precision bf16 --batch-size 8 --seed 3"
RECORDED = {"device": "cpu", "dataset": "synthetic", "image_size": 17, "model": "resnet18", "parameters": 11_181_642,
            "precision": "bf16", "batch_size": 8, "seed": 3, "steps": 2}


@pytest.mark.parametrize("chapter", [
    case(name, marks=[pytest.mark.slow] if name.endswith(("tf.py", "tensorflow")) else []) for name in ON])
def test_flags_reach_the_record(chapter, tmp_path, monkeypatch):
    # TensorFlow asks the CPU whether oneDNN has bf16, oneDNN asks DNNL_MAX_CPU_ISA: test-cpus would set them at odds.
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    tensorflow = chapter.endswith(("tf.py", "tensorflow"))  # reads the variable when it is imported: not forked
    found = check(record(chapter, ON[chapter], "--max-steps", 2, *FLAGS.split(), folder=tmp_path, launcher=tensorflow))
    assert found | RECORDED == found


@pytest.mark.parametrize("chapter", [
    case("01_single_node"), case("03_ddp"), case("02_horovod/tensorflow", marks=[pytest.mark.slow])])
def test_learning_rate_follows_the_global_batch_and_warms_up(chapter, tmp_path):
    """--lr is for 256 images; over --warmup-epochs it rises linearly, and the last warm-up step has all of it."""
    ranks, batch = ON[chapter], 40
    steps = 1437 // (ranks * batch)  # an epoch
    done = observe(chapter, ranks, tmp_path, "--batch-size", batch, "--lr", 0.3,
                   "--warmup-epochs", 1, "--epochs", 2)
    full = 0.3 * ranks * batch / 256
    assert lines(tmp_path / "rates.0") == pytest.approx([full * min(1, (n + 1) / steps) for n in range(2 * steps)])
    assert f"learning rate: {full:g}" in done.out and f"batch: {batch} a rank, {batch * ranks} global" in done.out


def test_epochs_and_max_steps_end_the_training_and_the_seed_decides_it(tmp_path):
    results = tmp_path / "results"
    rows = "", "--epochs 2", "--max-steps 30", "--max-steps 30", "--max-steps 30 --seed 1"
    out, _ = in_one_process("01_single_node", [f"{flags} --results {results}" for flags in rows])
    assert [part.count("images/s") for part in out.split("ranks: ")[1:]] == [5, 2, 2, 2, 2]
    records = lines(results)  # each is appended
    assert [record["steps"] for record in records] == [110, 44, 30, 30, 30]
    assert records[2]["loss"] == records[3]["loss"] != records[4]["loss"]


@numbers
def test_precision_is_that_of_the_computation(tmp_path):
    """fp64 keeps double parameters; bf16 keeps float parameters and computes the loss of a network in bfloat16."""
    widths = {"fp32": 4, "fp64": 8, "bf16": 4}
    flags = f"--epochs 1 --batch-size 479 --results {tmp_path}/results"
    _, ends = in_one_process("01_single_node", [
        f"{flags} --precision {precision} --checkpoint {tmp_path}/{precision}" for precision in widths])
    assert ends == [None] * 3
    losses = {found["precision"]: found["loss"] for found in lines(tmp_path / "results")}
    for precision, width in widths.items():
        parameters_of_model = torch.load(tmp_path / precision)["model"].values()
        assert {tensor.itemsize for tensor in parameters_of_model} == {width}
    rounding = abs(losses["bf16"] / losses["fp32"] - 1)
    assert rounding > 0
    close("loss, bf16, relative", rounding, BFLOAT16)
    assert 0 < abs(losses["fp32"] / losses["fp64"] - 1) < rounding


@numbers
def test_the_base_is_plain_pytorch(tmp_path):
    """Chapter 1's parameters after an epoch are those of the shortest loop that does the same."""
    record("01_single_node", 1, "--epochs", 1, "--precision", "fp64", "--checkpoint", tmp_path / "c", folder=tmp_path)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    train = torch.arange(len(images)) % 5 != 0
    images, labels = images[train].reshape(-1, 1, 8, 8), labels[train]
    images = (images - images[:256].mean()) / images[:256].std()
    torch.manual_seed(0)
    model = load_module(ROOT / "01_single_node" / "main.py").build_model("cnn", images).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 * 64 / 256, momentum=0.9)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    for batch in order[:22 * 64].split(64):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
    close("parameters, fp64", abs(own - parameters(tmp_path / "c")).max(), FP64)


@pytest.mark.slow
def test_tensorflow_s_base_is_plain_keras(tmp_path):
    """main_tf.py's parameters after an epoch are those of Keras' own model.fit()."""
    flags = "--epochs", 1, "--precision", "fp64", "--checkpoint", tmp_path / "c"
    record("01_single_node/main_tf.py", 1, *flags, folder=tmp_path)
    done = execute([sys.executable, PROGRAMS / "plain_keras.py", ROOT / "01_single_node", tmp_path / "own.npy"])
    assert done.code == 0, done.err
    close("parameters, fp64", abs(np.load(tmp_path / "own.npy") - parameters(tmp_path / "c")).max(), FP64)
