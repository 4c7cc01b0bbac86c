"""Slow links: predictions by hand-computed cases, and the loop that is timed."""

import ast
import math
import subprocess
from types import SimpleNamespace

import launch
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, load_module
from tolerances import ARITHMETIC, COUNT, FP64, close

from tools.measuring import lab_model, slow_link
from tools.measuring.lab_model import CENTRAL, Predictions

BYTES = {"03_ddp": 6505768, "04_deepspeed": 6505768, "05_zero": 2664232}  # of gradients
COMMIT = "ec7659b"  # before any run over a link that counts: 03_ddp/SLOW_LINK.md
ARGS = SimpleNamespace(dataset="digits", batch_size=16, precision="fp64", seed=3, lr=0.2, image_size=32)


def alone(chapter="03_ddp", batch=64, step=0.1, **more):
    return {"chapter": chapter, "batch_size": batch, "at_once": 2, "step_seconds": step, "kind": "alone"} | more


def together(chapter="03_ddp", batch=64, link="100mbit", **more):
    return {"chapter": chapter, "batch_size": batch, "nodes": 2, "link": link, "image_size": 32, "kind": "weak",
            "gradient_bytes": BYTES[chapter], "global_batch_size": 2 * batch} | more


@pytest.mark.check
def test_a_step_without_overlap_is_computing_and_bytes_over_the_link():
    """Chapter 4 on two nodes: the late one computes, then 6.5 MB pass at 90 % of 12.5 MB/s; chapter 5 passes more."""
    late = 0.1 * (1 + CENTRAL.jitter / math.sqrt(math.pi))
    bases = [alone("04_deepspeed"), *(alone("05_zero", 1024, stage=stage) for stage in (1, 3))]
    predictions = Predictions(bases)
    step = predictions.seconds(together("04_deepspeed"))
    assert step == pytest.approx(late + 6505768 / (0.9 * 12.5e6), rel=ARITHMETIC * 10)  # hops take 6 us
    assert predictions.seconds(together("04_deepspeed", link="none")) == pytest.approx(late + 2 * 6e-6)  # two buckets
    for stage, passed in ((1, 1.5), (3, 2)):
        step = predictions.seconds(together("05_zero", 1024, stage=stage))
        assert step == pytest.approx(late + passed * 2664232 / (0.9 * 12.5e6), rel=ARITHMETIC * 10)


@pytest.mark.check
def test_what_is_sent_early_is_hidden():
    """Of 0.1 s computing 98.8 % of the bytes are ready after 0.04 s: at 1 Gbit/s backward hides them."""
    model = load_module(ROOT / "03_ddp" / "main.py").build_model("cnn", torch.zeros(1, 3, 32, 32))
    (first, _), (rest, end) = lab_model.ready("DDP")
    assert first + rest == sum(4 * parameter.numel() for parameter in model.parameters()) and end == 1
    predictions = Predictions([alone(), alone(way="plain", program="slow_link.py", times=[0.1] * 4)])
    hidden = predictions.seconds(together(link="1gbit"), "network")
    assert hidden == pytest.approx(0.1 + rest / (0.9 * 125e6), rel=ARITHMETIC * 10)


@pytest.mark.check
def test_the_predictions_are_those_that_were_committed_first():
    """Comments and layout apart."""
    name = "tools/measuring/lab_model.py"
    shown = subprocess.run(["git", "-C", ROOT, "show", f"{COMMIT}:{name}"], capture_output=True, text=True)
    if shown.returncode:
        pytest.skip("a shallow clone, or no repository: the history is not here")

    def code(text):
        return ast.dump(ast.Module([part for part in ast.parse(text).body if not isinstance(part, ast.Expr)
                                    or not isinstance(part.value, ast.Constant)], []))

    assert code(shown.stdout) == code((ROOT / name).read_text())


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_loop_trains_as_main_py_does(group, tmp_path):
    """The same parameters after an epoch of digits, as its checkpoint has them."""
    saved = tmp_path / "saved.pt"
    launch.launch("03_ddp", 1, "--device", "cpu", "--batch-size", 16, "--seed", 3, "--precision",
                  "fp64", "--epochs", 1, "--checkpoint", saved)
    found = torch.nn.utils.parameters_to_vector(torch.load(saved)["model"].values())
    ours = slow_link.trained(slow_link.WAYS["plain"], ARGS, 0, 1, 1437 // 16)
    close("parameters, fp64", (ours - found).norm().item(), FP64)


def test_ways_that_only_pass_gradients_otherwise_train_the_same(group):
    plain, fp16, bucket, one, added, large = (
        slow_link.trained(slow_link.WAYS[name], ARGS, 0, 1, 5)
        for name in ("plain", "fp16", "bucket", "one", "accumulate", "batch"))
    for other in bucket, one:
        close("parameters, fp64", (plain - other).norm().item(), FP64)
    close("parameters, fp64", (added - large).norm().item(), FP64)
    moved = (plain - slow_link.trained(slow_link.WAYS["plain"], ARGS, 0, 1, 0)).norm()
    assert 0 < (plain - fp16).norm() < COUNT * moved < (plain - large).norm()
