"""Every main.py: each flag does what it says, and the record has one form."""

import math
import re
import sys

import numpy as np
import pytest
import torch
from conftest import (
    ON,
    PROGRAMS,
    ROOT,
    chapters,
    chapters_with,
    execute,
    in_one_process,
    lines,
    load_module,
    numbers,
    observe,
    parameters,
    record,
    run,
)
from sklearn.datasets import load_digits
from tolerances import BFLOAT16, FP64, close

RECORD = {  # name: type, and whether a value is possible
    "chapter": (str, lambda v: v in [*ON, "05_zero", "05_zero/fsdp.py"]), "ranks": (int, lambda v: v > 0),
    "nodes": (int, lambda v: v > 0),
    "device": (str, lambda v: v in ("cpu", "cuda")), "dataset": (str, bool), "image_size": (int, lambda v: v > 0),
    "model": (str, bool), "parameters": (int, lambda v: v > 0), "precision": (str, bool),
    "batch_size": (int, lambda v: v > 0), "global_batch_size": (int, lambda v: v > 0), "seed": (int, lambda v: True),
    "steps": (int, lambda v: v > 0), "step_seconds": (float, lambda v: v > 0),
    "images_per_second": (float, lambda v: v > 0), "gradient_bytes": (int, lambda v: v > 0),
    "peak_memory_bytes": (int, lambda v: v > 10**7), "loss": (float, math.isfinite),
    "accuracy": (float, lambda v: 0 <= v <= 1), "test_accuracy": (float, lambda v: 0 <= v <= 1),
    "total_seconds": (float, lambda v: v > 0)}


def check(found):
    """The record has exactly these names, with values of the right type that are possible and agree."""
    assert set(found) == set(RECORD)
    for name, (kind, possible) in RECORD.items():
        assert type(found[name]) is kind and possible(found[name]), (name, found[name])
    assert found["global_batch_size"] == found["ranks"] * found["batch_size"]
    assert found["images_per_second"] == pytest.approx(found["global_batch_size"] / found["step_seconds"])
    half = found["precision"] == "bf16" and found["chapter"] in ("04_deepspeed", "05_zero")  # DeepSpeed casts the model
    assert found["gradient_bytes"] == found["parameters"] * (2 if half else 8 if found["precision"] == "fp64" else 4)
    assert found["step_seconds"] * found["steps"] < 3 * found["total_seconds"]
    return found


FLAGS = [
    ("--dataset synthetic --image-size 12 --device cpu --seed 3",
     {"dataset": "synthetic", "image_size": 12, "parameters": 151_882, "device": "cpu", "seed": 3}),
    ("--model resnet18 --precision bf16 --batch-size 8 --lr 0.001 --dataset synthetic --image-size 17",
     {"model": "resnet18", "image_size": 17, "parameters": 11_181_642, "precision": "bf16", "batch_size": 8}),
    ("--dataset synthetic --precision fp64", {"image_size": 32, "parameters": 1_626_442, "precision": "fp64"}),
    ("--model resnet50 --batch-size 8", {"model": "resnet50", "parameters": 23_528_522, "batch_size": 8}),
]


@chapters("01_single_node", "01_single_node/main_tf.py")
def test_flags_reach_the_record(chapter, tmp_path):
    _, ends = in_one_process(chapter, [f"--max-steps 2 --results {tmp_path}/results {flags}" for flags, _ in FLAGS])
    assert ends == [None] * len(FLAGS)
    records = lines(tmp_path / "results")
    assert len(records) == len(FLAGS)
    for (_, expected), found in zip(FLAGS, records):
        check(found)
        assert found | expected == found and found["steps"] == 2


@pytest.mark.parametrize(("chapter", "flags", "expected"), chapters_with([], FLAGS[:2]))
def test_flags_reach_the_record_of_several_ranks(chapter, flags, expected, tmp_path):
    found = check(record(chapter, ON[chapter], "--max-steps", 2, *flags.split(), folder=tmp_path))
    assert found | expected == found and found["steps"] == 2


@chapters("03_ddp")
def test_both_ways_to_give_the_batch(chapter, tmp_path):
    ranks = ON[chapter]
    each = check(record(chapter, ranks, "--batch-size", 24, "--max-steps", 3, folder=tmp_path))
    together = check(record(chapter, ranks, "--global-batch-size", 24 * ranks, "--max-steps", 3, folder=tmp_path))
    assert each["batch_size"] == together["batch_size"] == 24
    assert each["loss"] == together["loss"]


@chapters()
def test_learning_rate_follows_the_global_batch_and_warms_up(chapter, tmp_path):
    """--lr is for 256 images; over --warmup-epochs it rises linearly, and the last warm-up step has all of it."""
    ranks, batch = ON[chapter], 40
    steps = 1437 // (ranks * batch)  # an epoch
    done = observe(chapter, ranks, tmp_path, "--batch-size", batch, "--lr", 0.3,
                   "--warmup-epochs", 1, "--epochs", 2)
    full = 0.3 * ranks * batch / 256
    assert lines(tmp_path / "rates.0") == pytest.approx([full * min(1, (n + 1) / steps) for n in range(2 * steps)])
    assert f"learning rate: {full:g}" in done.out and f"batch: {batch} a rank, {batch * ranks} global" in done.out


def test_seed_decides_the_training(tmp_path):
    results = tmp_path / "results"
    in_one_process("01_single_node", [f"--max-steps 10 --seed {seed} --results {results}" for seed in (0, 0, 1)])
    losses = [record["loss"] for record in lines(results)]
    assert losses[0] == losses[1] != losses[2]


def test_epochs_and_max_steps_end_the_training(tmp_path):
    results = tmp_path / "results"
    out, _ = in_one_process("01_single_node", [f"{flags} --results {results}"
                                               for flags in ("", "--epochs 2", "--max-steps 30")])
    assert [run.count("images/s") for run in out.split("ranks: ")[1:]] == [5, 2, 2]
    assert [record["steps"] for record in lines(results)] == [110, 44, 30]  # each is appended


@numbers
@chapters("01_single_node", "01_single_node/main_tf.py")
def test_precision_is_that_of_the_computation(chapter, tmp_path):
    """fp64 keeps double parameters; bf16 keeps float parameters and computes the loss of a network in bfloat16."""
    widths = {"fp32": 4, "fp64": 8, "bf16": 4}
    _, ends = in_one_process(chapter, [f"--epochs 1 --batch-size 479 --precision {precision} --checkpoint "
                                       f"{tmp_path}/{precision} --results {tmp_path}/results" for precision in widths])
    assert ends == [None] * 3
    losses = {found["precision"]: found["loss"] for found in lines(tmp_path / "results")}
    for precision, width in widths.items():
        checkpoint = tmp_path / precision
        if "tf" in chapter:
            with np.load(checkpoint) as arrays:
                assert {arrays[name].dtype.itemsize for name in arrays if "kernel" in name} == {width}
        else:
            assert {tensor.itemsize for tensor in torch.load(checkpoint)["model"].values()} == {width}
    rounding = abs(losses["bf16"] / losses["fp32"] - 1)
    assert rounding > 0
    close("loss, bf16, relative", rounding, BFLOAT16)
    if "tf" not in chapter:  # TensorFlow draws other initial parameters in fp64
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


def test_tensorflow_s_base_is_plain_keras(tmp_path):
    """main_tf.py's parameters after an epoch are those of Keras' own model.fit()."""
    flags = "--epochs", 1, "--precision", "fp64", "--checkpoint", tmp_path / "c"
    record("01_single_node/main_tf.py", 1, *flags, folder=tmp_path)
    done = execute([sys.executable, PROGRAMS / "plain_keras.py", ROOT / "01_single_node", tmp_path / "own.npy"])
    assert done.code == 0, done.err
    close("parameters, fp64", abs(np.load(tmp_path / "own.npy") - parameters(tmp_path / "c")).max(), FP64)


@chapters("01_single_node", "03_ddp")
def test_help_lists_every_flag(chapter):
    done = run(chapter, ON[chapter], "--help")
    flags = set(re.findall(r"--[a-z-]+", done.out))
    assert done.code == 0 and flags == {
        "--help", "--dataset", "--data-dir", "--model", "--batch-size", "--global-batch-size", "--epochs",
        "--max-steps", "--lr", "--warmup-epochs", "--seed", "--device", "--precision", "--image-size", "--checkpoint",
        "--resume", "--timeout", "--results"}
