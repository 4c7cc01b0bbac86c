"""Chapter 5: every stage is the same training and holds the bytes of the formulae."""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, lines, load_module, numbers, parameters, run
from sklearn.datasets import load_digits
from tolerances import COUNT, FP64, LOSS, ONE_DECIMAL, ROOM, close, distance

FIVE, FSDP = "05_zero", "05_zero/fsdp.py"
SMALL = "--width", 256, "--layers", 8, "--global-batch-size", 64  # 0.5 M parameters
LAYER = 256 * 256 + 256
STEPS = 1437 // 64  # per epoch; the accounting measures the second
RATE = 2.0  # --lr of the smooth variant, whose Adam divides by 1 and not by the size of a gradient


def train(chapter, ranks, folder, *flags):
    """Return the record of a run of the smooth variant."""
    done = run(chapter, ranks, *SMALL, "--lr", RATE, *flags, "--results", folder / "results",
               hook=["smooth.py"])
    assert done.code == 0, done.err
    return lines(folder / "results")[-1]


@pytest.fixture(scope="module")
def plain():
    """{precision: the mean loss, the parameters and their bound} of a plain loop over an epoch."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    chosen = torch.arange(len(images)) % 5 != 0
    labels = labels[chosen]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)[:STEPS * 64]

    def loop(dtype, turn):
        train = images[chosen].to(dtype)
        std, mean = torch.std_mean(train[:256], correction=0)
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn, "ReLU", torch.nn.SiLU)
            model = load_module(ROOT / FIVE / "perceptron.py").build_model(256, 8, 64).to(dtype)
        adam = torch.optim.Adam(model.parameters(), lr=RATE * 64 / 256, eps=1.0)
        losses = []
        for batch in map(turn, order.split(64)):
            adam.zero_grad()
            logits = model((train[batch] - mean) / std)
            loss = torch.nn.functional.cross_entropy(logits, labels[batch])
            loss.backward()
            adam.step()
            losses.append(loss.item())
        whole = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return sum(losses) / STEPS, whole.double().numpy()

    results = {}
    for precision, dtype in ("fp32", torch.float32), ("fp64", torch.float64):
        loss, one = loop(dtype, lambda batch: batch)
        _, other = loop(dtype, lambda batch: batch.flip(0))
        bound = FP64 if precision == "fp64" else ROOM * distance(one, other)
        results[precision] = SimpleNamespace(loss=loss, parameters=one, bound=bound)
    return results


def expect_bytes(record, stage):
    """Assert 1 % of the formula, or two layers where layers are gathered or split."""
    two_layers = 2 * LAYER * (8 if record["precision"] == "fp64" else 4)
    by_deepspeed = record["chapter"] == FIVE
    for counted in record["memory"]:
        for name, expected in record["memory_formula"].items():
            in_layers = (name == "peak gradients"
                         or (name == "gradients" and by_deepspeed and stage in (1, 2))
                         or (name == "optimizer state" and not by_deepspeed and stage == 1))
            tolerance = two_layers if in_layers else COUNT * expected
            assert abs(counted[name] - expected) <= tolerance, (name, counted[name], expected)


@pytest.mark.parametrize(("chapter", "stage", "ranks"), [
    pytest.param(FIVE, 0, 2, marks=numbers), pytest.param(FIVE, 1, 2, marks=numbers),
    pytest.param(FIVE, 2, 2, marks=numbers), pytest.param(FIVE, 3, 2, marks=numbers),
    pytest.param(FSDP, 1, 2, marks=numbers), pytest.param(FSDP, 3, 2, marks=numbers),
    pytest.param(FSDP, 3, 4, marks=pytest.mark.slow)])
def test_a_stage_is_the_plain_training_and_holds_its_bytes(chapter, stage, ranks, plain, tmp_path):
    """DeepSpeed has no fp64, and fsdp.py no checkpoint at stage 1: there the loss is compared."""
    precision = "fp64" if chapter == FSDP else "fp32"
    saves = (chapter, stage) != (FSDP, 1)
    record = train(chapter, ranks, tmp_path, "--stage", stage, "--precision", precision,
                   "--epochs", 1, *["--checkpoint", tmp_path / "c"] * saves)
    one = plain[precision]
    difference = abs(record["loss"] / one.loss - 1)
    close(f"loss, {precision}, relative", difference, FP64 if chapter == FSDP else LOSS)
    if saves:
        difference = distance(parameters(tmp_path / "c"), one.parameters)
        close(f"parameters, {precision}", difference, one.bound)
    expect_bytes(record, stage)


def test_mixed_precision_holds_the_bytes_of_the_paper(tmp_path):
    """16P/N at stage 3."""
    record = train(FIVE, 2, tmp_path, "--stage", 3, "--precision", "bf16", "--max-steps", 2)
    for counted in record["memory"]:
        roles = "parameters", "gradients", "master copy", "optimizer state"
        total = sum(counted[role] for role in roles)
        assert total == pytest.approx(16 / 2 * record["parameters"], rel=COUNT)


@pytest.mark.core
@pytest.mark.parametrize(("chapter", "flags", "ranks"), [
    (FIVE, ["--stage", 3], 2), (FSDP, ["--precision", "fp64"], 1)])
def test_resume_equals_an_uninterrupted_run(
        chapter, flags, ranks, plain, tmp_path):
    """A DeepSpeed checkpoint resumes only on the same number of ranks, fsdp.py's on any."""
    train(chapter, 2, tmp_path, *flags, "--checkpoint", tmp_path / "whole", "--epochs", 2)
    train(chapter, 2, tmp_path, *flags, "--checkpoint", tmp_path / "c", "--epochs", 1)
    resume = *flags, "--checkpoint", tmp_path / "c", "--epochs", 2, "--resume"
    if chapter == FIVE:
        done = run(chapter, 1, *SMALL, "--lr", RATE, *resume)
        assert done.code != 0 and "epoch 2" not in done.out, done
    record = train(chapter, ranks, tmp_path, *resume)
    assert record["steps"] == STEPS
    difference = distance(parameters(tmp_path / "c"), parameters(tmp_path / "whole"))
    precision = "fp64" if chapter == FSDP else "fp32"
    close(f"parameters, {precision}", difference, plain[precision].bound)


@pytest.mark.parametrize(("chapter", "flags", "message"), [
    (FIVE, "--stage 4", "--stage.*4"), (FSDP, "--offload cpu", "GPU"),
    (FSDP, "--stage 1 --checkpoint c", "--checkpoint.*--stage 3")])
def test_mistakes_are_one_line(chapter, flags, message, tmp_path):
    done = run(chapter, 1, *flags.split(), cwd=tmp_path)
    assert done.code == 2 and re.fullmatch(rf"(main|fsdp)\.py: .*{message}.*\n", done.err), done.err


@pytest.mark.check
def test_formula_reproduces_the_paper():
    """Rajbhandari et al., figure 1: 7.5 billion parameters, 64 ranks, mixed precision, in GB."""
    accounting = load_module(ROOT / FIVE / "accounting.py")
    formulae = [accounting.formula(stage, 64, 7_500_000_000, 0, width=2, master=4,
                                   moments=8, keeps_gradients=True) for stage in range(4)]
    gigabytes = [sum(formula[role] for role in accounting.ROLES) / 1e9 for formula in formulae]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], abs=ONE_DECIMAL)
