"""Chapter 5: each stage is the same training."""

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    GPT_SHAPE,
    GPT_TEXT,
    ROOT,
    assert_refused,
    gpt_flags,
    load_module,
    numbers,
    read_records,
    run,
)
from tolerances import FP64, LOSS_FP32, ONE_DECIMAL, ROUNDING_FACTOR, assert_close, distance
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tools.measuring.parameters import named_parameters
from workshop import report

ZERO, FSDP, TWO_D = "05_zero", "05_zero/fsdp.py", "05_zero/two_d.py"
CONTEXT, WIDTH, BATCH = GPT_SHAPE["context"], GPT_SHAPE["width"], 64
LEARNING_RATE = 2.0  # high, because the smooth variant's Adam hardly rescales the gradients


def sequences():
    """Return the text's bytes, (sequences, context + 1). The last tenth is for the test."""
    text = torch.tensor(list(GPT_TEXT))
    return text.unfold(0, CONTEXT + 1, CONTEXT)


TRAINED = len(sequences()) - len(sequences()) // 10
STEPS = TRAINED // BATCH  # in an epoch


def train(chapter, ranks, folder, *flags):
    """Train the smooth variant, in fp64 if possible. Return its record, and its parameters."""
    precision = "fp32" if chapter == ZERO else "fp64"
    result = run(chapter, ranks, *gpt_flags(folder), "--global-batch-size", BATCH, "--lr",
                 LEARNING_RATE, "--precision", precision, "--checkpoint", folder / "c", *flags,
                 "--results", folder / "results", hook=["smooth.py"])
    assert result.code == 0, result.err
    named = named_parameters(folder / "c")
    vector = np.concatenate([named[name].ravel() for name in sorted(named)])
    return read_records(folder / "results")[-1], vector


@functools.cache
def plain_loop():
    """Return {precision: losses, parameters and their bound} of a plain loop over an epoch."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(TRAINED, generator=generator)[:STEPS * BATCH]
    transformer = load_module(ROOT / ZERO / "transformer.py")

    def compute_loss(model, part):
        logits = model(part[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, part[:, 1:].flatten()) / math.log(2)

    def train_plainly(dtype, batches):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*transformer.parts(**GPT_SHAPE)).to(dtype)
        adam = torch.optim.Adam(model.parameters(), eps=1.0,
                                lr=LEARNING_RATE * math.sqrt(BATCH / 256))
        losses = []
        for batch in batches:
            adam.zero_grad()
            loss = compute_loss(model, sequences()[batch])
            (loss * math.log(2)).backward()
            adam.step()
            losses.append(loss.item())
        with torch.no_grad():
            test_loss = compute_loss(model, sequences()[TRAINED:]).item()
        vector = torch.cat([tensor.flatten() for _, tensor in sorted(model.state_dict().items())])
        return SimpleNamespace(loss=sum(losses) / STEPS, test_loss=test_loss,
                               parameters=vector.double().numpy(), bound=FP64)

    batches = order.split(BATCH)
    results = {"fp64": train_plainly(torch.float64, batches),
               "fp32": train_plainly(torch.float32, batches)}
    reversed_run = train_plainly(torch.float32, [batch.flip(0) for batch in batches])
    results["fp32"].bound = ROUNDING_FACTOR * distance(results["fp32"].parameters,
                                                       reversed_run.parameters)
    return results


@numbers
@pytest.mark.parametrize(("chapter", "flags", "ranks"), [
    *[(ZERO, ["--stage", stage], 2) for stage in range(4)], (FSDP, [], 2),
    (FSDP, ["--replicas", 2], 4), pytest.param(TWO_D, ["--tensor", 2], 4, marks=pytest.mark.core)])
def test_each_stage_trains_as_a_plain_loop(chapter, flags, ranks, tmp_path):
    """DeepSpeed has no fp64."""
    record, weights = train(chapter, ranks, tmp_path, *flags, "--epochs", 1)
    expected = plain_loop()[record["precision"]]
    for name in ("loss", "test_loss"):
        difference = abs(record[name] / getattr(expected, name) - 1)
        assert_close(f"{name}, {record['precision']}, relative", difference,
                     LOSS_FP32 if chapter == ZERO else FP64)
    difference = distance(weights, expected.parameters)
    assert_close(f"parameters, {record['precision']}", difference, expected.bound)


@pytest.mark.core
def test_deepspeed_resumes_on_as_many_ranks_only(tmp_path):
    train(ZERO, 2, tmp_path, "--stage", 3, "--epochs", 1)
    resume_flags = "--stage", 3, "--epochs", 2, "--resume"
    result = run(ZERO, 1, *gpt_flags(tmp_path), "--global-batch-size", BATCH, *resume_flags,
                 "--checkpoint", tmp_path / "c")
    assert result.code != 0 and "epoch 2" not in result.out, result
    record, weights = train(ZERO, 2, tmp_path, *resume_flags)
    (tmp_path / "whole").mkdir()
    _, expected = train(ZERO, 2, tmp_path / "whole", "--stage", 3, "--epochs", 2)
    assert record["steps"] == STEPS
    assert_close("parameters, fp32", distance(weights, expected), plain_loop()["fp32"].bound)


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    """Return the parameters of an uninterrupted run on one rank."""
    return train(FSDP, 1, tmp_path_factory.mktemp("two_epochs"), "--epochs", 2)[1]


@pytest.mark.core
@pytest.mark.parametrize(("program", "flags"), [
    (FSDP, ["--replicas", 2]), (TWO_D, ["--tensor", 2])])
def test_one_rank_resumes_from_the_checkpoint_of_four(program, flags, two_epochs, tmp_path):
    train(program, 4, tmp_path, *flags, "--epochs", 1)
    record, weights = train(FSDP, 1, tmp_path, "--epochs", 2, "--resume")
    assert record["steps"] == STEPS
    assert_close("parameters, fp64", distance(weights, two_epochs), FP64)


@pytest.mark.parametrize(("program", "ranks", "flags", "message"), [
    (ZERO, 1, "--stage 4", "--stage.*4"), (FSDP, 1, "--offload cpu", "GPU"),
    (FSDP, 1, "--text missing", "--text missing: No such file"),
    (FSDP, 1, "--heads 5", "--heads 5"), (FSDP, 1, "--text /dev/null", "longer --text"),
    (FSDP, 1, "--context 100000", "lower --batch-size or --context"),
    (FSDP, 2, "--replicas 3", "--replicas 3 has to divide 2, the number of ranks"),
    (TWO_D, 1, "--tensor 2", "--tensor 2 has to divide --heads, --context and 1 ranks"),
    (TWO_D, 2, "--tensor 2 --heads 3", "--tensor 2 has to divide --heads")])
def test_mistakes_get_one_line(program, ranks, flags, message, tmp_path):
    assert_refused(run(program, ranks, *flags.split(), cwd=tmp_path), message)


@pytest.mark.check
def test_each_byte_is_predicted_once(tmp_path):
    """Except the first byte, and the bytes of the last, incomplete sequence."""
    flags = gpt_flags(tmp_path)
    args = SimpleNamespace(text=flags[-1], context=CONTEXT)
    train_set, test_set = load_module(ROOT / ZERO / "text.py").load_text(args, BATCH)
    counted = [bytes(next_tokens.tolist()) for part in (train_set, test_set)
               for _, next_tokens in part]
    assert b"".join(counted) == GPT_TEXT[1:1 + len(counted) * CONTEXT]
    assert len(GPT_TEXT) - 1 - len(counted) * CONTEXT < CONTEXT
    for tokens, next_tokens in train_set:
        assert tokens[1:].tolist() == next_tokens[:-1].tolist()


@pytest.mark.check
def test_the_formula_reproduces_the_paper():
    """Rajbhandari et al., figure 1: 7.5 billion parameters, 64 ranks, mixed precision, in GB."""
    formula = load_module(ROOT / ZERO / "zero_formula.py").formula
    gigabytes = [sum(formula(stage, 64, 7_500_000_000).values()) / 1e9 for stage in range(4)]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], abs=ONE_DECIMAL)


@pytest.mark.check
def test_the_flops_of_a_step_are_those_that_torch_counts():
    """Of attention half: torch counts each token with the whole context, also what comes later."""
    model = torch.nn.Sequential(*load_module(ROOT / ZERO / "transformer.py").parts(**GPT_SHAPE))
    tokens = torch.zeros(3, CONTEXT, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    attention = counts.pop(torch.ops.aten.bmm)
    counted = (sum(counts.values()) + attention / 2) / tokens.numel()
    assert report.gpt_flops(GPT_SHAPE["layers"], WIDTH, CONTEXT) == counted


@pytest.mark.check
@pytest.mark.parametrize(("gpu", "precision", "mfu"), [
    ("NVIDIA H100 80GB HBM3", "bf16", 0.25), ("NVIDIA H100 80GB HBM3", "fp32", None),
    ("NVIDIA H100 NVL", "bf16", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None)])
def test_tokens_per_second_and_mfu(gpu, precision, mfu):
    """Two ranks, on stand-ins for GPUs, take the time of a step at a quarter of an H100's peak."""
    flops = 8 * CONTEXT * report.gpt_flops(GPT_SHAPE["layers"], WIDTH, CONTEXT)
    seconds = flops / 989e12 / (2 * 0.25)  # H100's data sheet: 989 TFLOP/s
    training = report.Report(
        SimpleNamespace(epochs=1), samples="sequences", model="GPT", device="cpu", ranks=2,
        parameters=1, precision=precision, global_batch_size=8, **GPT_SHAPE)
    training.gpu = SimpleNamespace(get_device_name=lambda: gpu)
    speed = training.measure_speed(3, 3 * seconds)
    assert speed["tokens_per_second"] == pytest.approx(8 * CONTEXT / seconds)
    assert speed.get("mfu") == (mfu and pytest.approx(mfu))
