"""Chapter 5: each stage is the same training."""

import functools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import GPT_SHAPE, GPT_TEXT, ROOT, gpt_flags, load_module, numbers, read_records, run
from tolerances import FP64, LOSS_FP32, ONE_DECIMAL, ROUNDING_FACTOR, assert_close, distance
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cluster.parameters import parameters
from workshop import report

ZERO, FSDP = "05_zero", "05_zero/fsdp.py"
CONTEXT, WIDTH, BATCH = GPT_SHAPE["context"], GPT_SHAPE["width"], 64
LEARNING_RATE = 2.0  # high, because the smooth variant's Adam hardly rescales the gradients


def sequences():
    """Return the text's bytes, (sequences, context + 1). The last tenth is for the test."""
    text = torch.tensor(list(GPT_TEXT))
    return text.unfold(0, CONTEXT + 1, CONTEXT)


TRAINED = len(sequences()) - len(sequences()) // 10
STEPS = TRAINED // BATCH  # in an epoch


def train(chapter, ranks, folder, *flags):
    """Train the smooth variant. Return its record."""
    result = run(chapter, ranks, *gpt_flags(folder), "--global-batch-size", BATCH, "--lr",
                 LEARNING_RATE, *flags, "--results", folder / "results", hook=["smooth.py"])
    assert result.code == 0, result.err
    return read_records(folder / "results")[-1]


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
        vector = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return SimpleNamespace(loss=sum(losses) / STEPS, test_loss=test_loss,
                               parameters=vector.double().numpy(), bound=FP64,
                               named_parameters={name: parameter.detach().numpy() for
                                                 name, parameter in model.named_parameters()})

    batches = order.split(BATCH)
    results = {"fp64": train_plainly(torch.float64, batches),
               "fp32": train_plainly(torch.float32, batches)}
    reversed_run = train_plainly(torch.float32, [batch.flip(0) for batch in batches])
    results["fp32"].bound = ROUNDING_FACTOR * distance(results["fp32"].parameters,
                                                       reversed_run.parameters)
    return results


@pytest.mark.parametrize(("chapter", "stage", "ranks"), [
    pytest.param(ZERO, 0, 2, marks=numbers), pytest.param(ZERO, 1, 2, marks=numbers),
    pytest.param(ZERO, 2, 2, marks=numbers), pytest.param(ZERO, 3, 2, marks=numbers),
    pytest.param(FSDP, 3, 2, marks=numbers),
    pytest.param(FSDP, 3, 4, marks=pytest.mark.slow)])
def test_each_stage_trains_as_a_plain_loop(chapter, stage, ranks, tmp_path):
    """DeepSpeed has no fp64."""
    precision = "fp64" if chapter == FSDP else "fp32"
    flags = [] if chapter == FSDP else ["--stage", stage]
    record = train(chapter, ranks, tmp_path, *flags, "--precision", precision, "--epochs", 1,
                   "--checkpoint", tmp_path / "c")
    expected = plain_loop()[precision]
    for name in ("loss", "test_loss"):
        difference = abs(record[name] / getattr(expected, name) - 1)
        assert_close(f"{name}, {precision}, relative", difference,
                     FP64 if chapter == FSDP else LOSS_FP32)
    difference = distance(parameters(tmp_path / "c"), expected.parameters)
    assert_close(f"parameters, {precision}", difference, expected.bound)


@pytest.mark.core
@pytest.mark.parametrize(("chapter", "flags", "ranks"), [
    (ZERO, ["--stage", 3], 2), (FSDP, ["--precision", "fp64"], 1)])
def test_resume_equals_an_uninterrupted_run(chapter, flags, ranks, tmp_path):
    """On the same number of ranks with DeepSpeed, which refuses another; on any with fsdp.py."""
    train(chapter, 2, tmp_path, *flags, "--checkpoint", tmp_path / "uninterrupted", "--epochs", 2)
    train(chapter, 2, tmp_path, *flags, "--checkpoint", tmp_path / "c", "--epochs", 1)
    resume_flags = *flags, "--checkpoint", tmp_path / "c", "--epochs", 2, "--resume"
    if chapter == ZERO:
        result = run(chapter, 1, *gpt_flags(tmp_path), "--global-batch-size", BATCH, *resume_flags)
        assert result.code != 0 and "epoch 2" not in result.out, result
    record = train(chapter, ranks, tmp_path, *resume_flags)
    assert record["steps"] == STEPS
    speed = BATCH * CONTEXT / record["step_seconds"]
    assert record["tokens_per_second"] == pytest.approx(speed) and "mfu" not in record
    difference = distance(parameters(tmp_path / "c"), parameters(tmp_path / "uninterrupted"))
    precision = "fp64" if chapter == FSDP else "fp32"
    assert_close(f"parameters, {precision}", difference, plain_loop()[precision].bound)


@pytest.mark.parametrize(("chapter", "flags", "message"), [
    (ZERO, "--stage 4", "--stage.*4"), (FSDP, "--offload cpu", "GPU"),
    (FSDP, "--text missing", "--text missing: No such file"), (FSDP, "--heads 5", "--heads 5"),
    (FSDP, "--text /dev/null", "longer --text"),
    (FSDP, "--context 100000", "lower --batch-size or --context")])
def test_mistakes_get_one_line(chapter, flags, message, tmp_path):
    result = run(chapter, 1, *flags.split(), cwd=tmp_path)
    assert result.code == 2, result.err
    assert re.fullmatch(rf"(main|fsdp)\.py: .*{message}.*\n", result.err), result.err


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
def test_synthetic_text_suits_any_batch_in_little_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = SimpleNamespace(text="synthetic", context=8192)
    load_text = load_module(ROOT / ZERO / "text.py").load_text
    train_set, test_set = load_text(args, 4096)
    assert (len(train_set), len(test_set)) == (50 * 4096, 4096)
    tokens, next_tokens = train_set[-1]
    assert torch.equal(tokens[1:], next_tokens[:-1]) and tokens.shape == (8192,)
    assert tokens.untyped_storage().nbytes() < 1e6
    (tmp_path / "synthetic").write_text("a file of this name")
    with pytest.raises(SystemExit, match=r"use --text \./synthetic"):
        load_text(args, 4096)


@pytest.mark.check
def test_the_formula_reproduces_the_paper():
    """Rajbhandari et al., figure 1: 7.5 billion parameters, 64 ranks, mixed precision, in GB."""
    formula = load_module(ROOT / ZERO / "zero_formula.py").formula
    gigabytes = [sum(formula(stage, 64, 7_500_000_000).values()) / 1e9 for stage in range(4)]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], abs=ONE_DECIMAL)


@pytest.mark.check
def test_the_network_has_the_parameters_of_the_formula():
    zero, transformer = (load_module(ROOT / ZERO / f"{name}.py")
                         for name in ("zero_formula", "transformer"))
    parts = list(transformer.parts(**GPT_SHAPE))
    counts = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    assert counts[1] == zero.block_parameter_count(WIDTH)
    assert sum(counts) == zero.parameter_count(GPT_SHAPE["layers"], WIDTH, CONTEXT)


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
    ("NVIDIA H100 NVL", "bf16", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
    ("NVIDIA H100 PCIe", "bf16", None), ("another", "bf16", None)])
def test_tokens_per_second_and_mfu(gpu, precision, mfu, tmp_path, monkeypatch, capsys):
    """Two ranks, on stand-ins for GPUs, take the time of a step at a quarter of an H100's peak."""
    flops = 8 * CONTEXT * report.gpt_flops(GPT_SHAPE["layers"], WIDTH, CONTEXT)
    milliseconds = 1000 * flops / 989e12 / (2 * 0.25)  # H100's data sheet: 989 TFLOP/s
    clock = SimpleNamespace(steps=0, elapsed_time=lambda end: milliseconds)
    training = report.Report(
        SimpleNamespace(epochs=1, results=tmp_path / "r"), samples="sequences", model="GPT",
        device="cpu", ranks=2, parameters=1, precision=precision, global_batch_size=8, **GPT_SHAPE)
    training.gpu = SimpleNamespace(get_device_name=lambda: gpu, max_memory_allocated=lambda: 0)
    training.last_step, training.steps_done = 3, 0
    monkeypatch.setattr(training, "now", lambda: clock)
    monkeypatch.setattr(report.time, "perf_counter", lambda: clock.steps * milliseconds / 1000)
    training.print("")
    training.start_epoch()
    for clock.steps in (1, 2, 3):
        training.end_step(clock.steps)
    training.end_epoch(0, 1.0)
    training.write_record()
    record, = read_records(tmp_path / "r")
    tokens = 8 * CONTEXT * 1000 / milliseconds
    assert record["tokens_per_second"] == pytest.approx(tokens)
    assert record.get("mfu") == (mfu and pytest.approx(mfu))
    line = f"{tokens:,.0f} tokens/s" + (", MFU 25.0%" if mfu else "")
    assert capsys.readouterr().out.endswith(f"bits per byte, {line}\n")


@pytest.mark.slow
def test_ddp_and_fsdp_are_timed_on_the_same_training():
    result = run("05_zero/ddp_and_fsdp.py", 1, "--steps", 2, "--layers", 1, "--width", 16)
    assert result.code == 0, result.err
    ddp, fsdp = re.findall(r"loss ([\d.]+)", result.out)
    assert ddp == fsdp
