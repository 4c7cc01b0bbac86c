"""Chapter 5: each stage is the same training, with the bytes of the formulae on each rank."""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, load_module, numbers, parameters, read_records, run
from sklearn.datasets import load_digits
from tolerances import COUNT, FP64, LOSS_FP32, ONE_DECIMAL, ROUNDING_FACTOR, assert_close, distance

ZERO, FSDP = "05_zero", "05_zero/fsdp.py"
MODEL_FLAGS = "--width", 256, "--layers", 8, "--global-batch-size", 64  # 0.5 M parameters
LAYER = 256 * 256 + 256
STEPS = 1437 // 64  # in an epoch; the accounting measures step 2
LEARNING_RATE = 2.0  # high, because the smooth variant's Adam hardly rescales the gradients


def train(chapter, ranks, folder, *flags):
    """Train the smooth variant. Return its record."""
    result = run(chapter, ranks, *MODEL_FLAGS, "--lr", LEARNING_RATE, *flags,
                 "--results", folder / "results", hook=["smooth.py"])
    assert result.code == 0, result.err
    return read_records(folder / "results")[-1]


@pytest.fixture(scope="module")
def plain_loop():
    """Return {precision: mean loss, parameters and their bound} of a plain loop over an epoch."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    train_mask = torch.arange(len(images)) % 5 != 0
    labels = labels[train_mask]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:STEPS * 64]

    def train_plainly(dtype, batches):
        train_images = images[train_mask].to(dtype)
        std, mean = torch.std_mean(train_images[:256], correction=0)
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn, "ReLU", torch.nn.SiLU)
            model = load_module(ROOT / ZERO / "perceptron.py").build_model(256, 8, 64).to(dtype)
        adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE * 64 / 256, eps=1.0)
        losses = []
        for batch in batches:
            adam.zero_grad()
            logits = model((train_images[batch] - mean) / std)
            loss = torch.nn.functional.cross_entropy(logits, labels[batch])
            loss.backward()
            adam.step()
            losses.append(loss.item())
        vector = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return sum(losses) / STEPS, vector.double().numpy()

    batches = order.split(64)
    loss, vector = train_plainly(torch.float64, batches)
    results = {"fp64": SimpleNamespace(loss=loss, parameters=vector, bound=FP64)}
    loss, vector = train_plainly(torch.float32, batches)
    _, reversed_vector = train_plainly(torch.float32, [batch.flip(0) for batch in batches])
    bound = ROUNDING_FACTOR * distance(vector, reversed_vector)
    results["fp32"] = SimpleNamespace(loss=loss, parameters=vector, bound=bound)
    return results


def assert_bytes(record, stage):
    """Assert the formula's bytes: within 1 %, or two layers where layers are gathered or split."""
    two_layers = 2 * LAYER * (8 if record["precision"] == "fp64" else 4)
    by_deepspeed = record["chapter"] == ZERO
    for counts in record["memory"]:
        for name, expected in record["memory_formula"].items():
            varies_by_layers = (name == "peak gradients"
                                or (name == "gradients" and by_deepspeed and stage in (1, 2))
                                or (name == "optimizer state" and not by_deepspeed and stage == 1))
            tolerance = two_layers if varies_by_layers else COUNT * expected
            assert abs(counts[name] - expected) <= tolerance, (name, counts[name], expected)


@pytest.mark.parametrize(("chapter", "stage", "ranks"), [
    pytest.param(ZERO, 0, 2, marks=numbers), pytest.param(ZERO, 1, 2, marks=numbers),
    pytest.param(ZERO, 2, 2, marks=numbers), pytest.param(ZERO, 3, 2, marks=numbers),
    pytest.param(FSDP, 1, 2, marks=numbers), pytest.param(FSDP, 3, 2, marks=numbers),
    pytest.param(FSDP, 3, 4, marks=pytest.mark.slow)])
def test_each_stage_trains_as_a_plain_loop_with_its_bytes(
        chapter, stage, ranks, plain_loop, tmp_path):
    """DeepSpeed has no fp64. fsdp.py saves nothing at stage 1, so only its loss is compared."""
    precision = "fp64" if chapter == FSDP else "fp32"
    has_checkpoint = (chapter, stage) != (FSDP, 1)
    flags = ["--checkpoint", tmp_path / "c"] if has_checkpoint else []
    record = train(chapter, ranks, tmp_path, "--stage", stage, "--precision", precision,
                   "--epochs", 1, *flags)
    expected = plain_loop[precision]
    difference = abs(record["loss"] / expected.loss - 1)
    assert_close(f"loss, {precision}, relative", difference, FP64 if chapter == FSDP else LOSS_FP32)
    if has_checkpoint:
        difference = distance(parameters(tmp_path / "c"), expected.parameters)
        assert_close(f"parameters, {precision}", difference, expected.bound)
    assert_bytes(record, stage)


def test_mixed_precision_needs_the_bytes_of_the_paper(tmp_path):
    """At stage 3, 16 bytes per parameter, divided by the number of ranks."""
    record = train(ZERO, 2, tmp_path, "--stage", 3, "--precision", "bf16", "--max-steps", 2)
    for counts in record["memory"]:
        roles = "parameters", "gradients", "master copy", "optimizer state"
        total = sum(counts[role] for role in roles)
        assert total == pytest.approx(16 / 2 * record["parameters"], rel=COUNT)


@pytest.mark.core
@pytest.mark.parametrize(("chapter", "flags", "ranks"), [
    (ZERO, ["--stage", 3], 2), (FSDP, ["--precision", "fp64"], 1)])
def test_resume_equals_an_uninterrupted_run(chapter, flags, ranks, plain_loop, tmp_path):
    """On the same number of ranks with DeepSpeed, which refuses another; on any with fsdp.py."""
    train(chapter, 2, tmp_path, *flags, "--checkpoint", tmp_path / "uninterrupted", "--epochs", 2)
    train(chapter, 2, tmp_path, *flags, "--checkpoint", tmp_path / "c", "--epochs", 1)
    resume_flags = *flags, "--checkpoint", tmp_path / "c", "--epochs", 2, "--resume"
    if chapter == ZERO:
        result = run(chapter, 1, *MODEL_FLAGS, "--lr", LEARNING_RATE, *resume_flags)
        assert result.code != 0 and "epoch 2" not in result.out, result
    record = train(chapter, ranks, tmp_path, *resume_flags)
    assert record["steps"] == STEPS
    difference = distance(parameters(tmp_path / "c"), parameters(tmp_path / "uninterrupted"))
    precision = "fp64" if chapter == FSDP else "fp32"
    assert_close(f"parameters, {precision}", difference, plain_loop[precision].bound)


@pytest.mark.parametrize(("chapter", "flags", "message"), [
    (ZERO, "--stage 4", "--stage.*4"), (FSDP, "--offload cpu", "GPU"),
    (FSDP, "--stage 1 --checkpoint c", "--checkpoint.*--stage 3")])
def test_mistakes_get_one_line(chapter, flags, message, tmp_path):
    result = run(chapter, 1, *flags.split(), cwd=tmp_path)
    assert result.code == 2, result.err
    assert re.fullmatch(rf"(main|fsdp)\.py: .*{message}.*\n", result.err), result.err


@pytest.mark.check
def test_the_formula_reproduces_the_paper():
    """Rajbhandari et al., figure 1: 7.5 billion parameters, 64 ranks, mixed precision, in GB."""
    accounting = load_module(ROOT / ZERO / "accounting.py")
    formulae = [accounting.formula(stage, 64, 7_500_000_000, 0, element_bytes=2, master=4,
                                   moments=8, keeps_gradients=True) for stage in range(4)]
    gigabytes = [sum(formula[role] for role in accounting.ROLES) / 1e9 for formula in formulae]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], abs=ONE_DECIMAL)
