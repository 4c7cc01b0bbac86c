"""Chapter 5: every stage is the same training, and holds the bytes that the formulae say."""

import importlib
import re
import sys
from types import SimpleNamespace

import forked
import pytest
import torch
from conftest import (
    OBSERVED,
    PROGRAMS,
    ROOT,
    copy_of,
    environment,
    execute,
    lines,
    load_module,
    numbers,
    parameters,
    run,
)
from sklearn.datasets import load_digits
from tolerances import COUNT, FP64, LOSS, ONE_DECIMAL, ROOM, close, distance
from tools.measuring.collectives import passed

from submit.study import command

FIVE, FSDP = "05_zero", "05_zero/fsdp.py"
SMALL = "--width", 256, "--layers", 8, "--global-batch-size", 64  # 0.5 M parameters
LAYER = 256 * 256 + 256
STEPS = 1437 // 64  # an epoch, of which the accounting looks at the second and counted.py at the fourth
RATE = 2.0  # --lr of the twin, whose Adam divides by 1 and not by the size of a gradient
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def zero():
    """Chapter 5's main.py and accounting.py as modules."""
    sys.path.insert(0, str(ROOT / FIVE))
    yield load_module(ROOT / FIVE / "main.py"), importlib.import_module("accounting")
    sys.path.remove(str(ROOT / FIVE))


def train(chapter, ranks, folder, *flags, code=0, counting=False):
    """What a run of the smooth twin printed, and its record; counting: with the collectives of a step, for passed()."""
    words = command(chapter, ranks, *SMALL, "--lr", RATE, *flags, "--results", folder / "results")
    words = words[words.index(sys.executable) + 1:]
    done = forked.run([PROGRAMS / "counted.py", *words] if counting else [OBSERVED, folder, *words], ranks,
                      environment() | {"TWIN": "smooth"})
    assert done.code == code, done.err
    return done, lines(folder / "results")[-1] if code == 0 else None


@pytest.fixture(scope="module")
def plain(zero):
    """{precision: of a plain loop over an epoch of the twin the mean loss, the parameters, the bound in fp32}."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    chosen = torch.arange(len(images)) % 5 != 0
    labels = labels[chosen]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:STEPS * 64]

    def loop(dtype, turn):
        train = images[chosen].to(dtype).reshape(-1, 1, 8, 8)
        std, mean = torch.std_mean(train[:256])
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn, "ReLU", torch.nn.SiLU)
            model = zero[0].build_model(256, 8, train).to(dtype)
        adam, losses = torch.optim.Adam(model.parameters(), lr=RATE * 64 / 256, eps=1.0), []
        for batch in map(turn, order.split(64)):
            adam.zero_grad()
            loss = torch.nn.functional.cross_entropy(model((train[batch] - mean) / std), labels[batch])
            loss.backward()
            adam.step()
            losses.append(loss.item())
        whole = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()
        return sum(losses) / STEPS, whole.numpy().copy()  # not a view: the accounting would find its tensor

    found = {}
    for precision, dtype in ("fp32", torch.float32), ("fp64", torch.float64):
        loss, one = loop(dtype, lambda batch: batch)
        _, other = loop(dtype, lambda batch: batch.flip(0))
        found[precision] = SimpleNamespace(loss=loss, parameters=one, bound=ROOM * distance(one, other))
    return found


def expect_bytes(found, stage):
    """On every rank within 1 % of the formula, or within a layer where layers are gathered, or lie in two shares."""
    itemsize = 8 if found["precision"] == "fp64" else 4
    for counted in found["memory"]:
        for name, expected in found["memory_formula"].items():
            tolerance = COUNT * expected
            if name == "peak gradients" or (name == "gradients" and found["chapter"] == FIVE and stage in (1, 2)):
                tolerance = 2 * itemsize * LAYER
            elif name == "optimizer state" and found["chapter"] == FSDP and stage == 1:
                tolerance = 2 * itemsize * LAYER  # whole tensors are dealt out
            assert abs(counted[name] - expected) <= tolerance, (name, counted[name], expected)


@pytest.mark.parametrize(("chapter", "stage", "ranks"), [
    pytest.param(FIVE, 0, 2, marks=numbers), pytest.param(FIVE, 1, 2, marks=numbers),
    pytest.param(FIVE, 2, 2, marks=numbers), pytest.param(FIVE, 3, 2, marks=numbers),
    pytest.param(FSDP, 1, 2, marks=numbers), pytest.param(FSDP, 3, 2, marks=numbers),
    pytest.param(FIVE, 3, 4, marks=slow), pytest.param(FSDP, 3, 4, marks=slow)])
def test_a_stage_is_the_plain_training_and_holds_its_bytes(chapter, stage, ranks, plain, tmp_path):
    """DeepSpeed has no fp64, and fsdp.py no checkpoint at stage 1: there the loss is compared."""
    precision = "fp64" if chapter == FSDP else "fp32"
    checkpoint = [] if (chapter, stage) == (FSDP, 1) else ["--checkpoint", tmp_path / "c"]
    done, found = train(chapter, ranks, tmp_path, "--stage", stage, "--precision", precision, "--epochs", 1,
                        *checkpoint, counting=ranks == 2)
    if ranks == 2:
        if (chapter, stage) == (FIVE, 0):  # one all-reduce, of all gradients
            assert len(re.findall(r'"gloo:all_reduce", \[\[\d+', done.out)) == 1
        times = 3 if stage == 3 or checkpoint == [] else 2  # ZeroRedundancyOptimizer broadcasts what it has updated
        assert passed(done.out) == pytest.approx(times * found["parameters"], rel=COUNT)
    one = plain[precision]
    close(f"loss, {precision}, relative", abs(found["loss"] / one.loss - 1), FP64 if chapter == FSDP else LOSS)
    if checkpoint:
        apart_by = distance(parameters(tmp_path / "c"), one.parameters)
        close(f"parameters, {precision}", apart_by, FP64 if chapter == FSDP else one.bound)
    expect_bytes(found, stage)


def test_gradients_that_are_summed_and_not_averaged_are_refused():
    """As FSDP over gloo does in PyTorch 2.8.0; Adam would hide it."""
    done = forked.run([PROGRAMS / "summing.py", ROOT / FSDP, *SMALL, "--max-steps", "1"], 2, environment())
    assert done.code == 2 and re.fullmatch("fsdp.py: FSDP of PyTorch .* 2 times as large .*\n", done.err), done.err


def test_in_mixed_precision_a_rank_holds_what_the_paper_says(tmp_path):
    """16P/N at stage 3."""
    _, found = train(FIVE, 2, tmp_path, "--stage", 3, "--precision", "bf16", "--max-steps", 2)
    for counted in found["memory"]:
        held = sum(counted[role] for role in ("parameters", "gradients", "master copy", "optimizer state"))
        assert held == pytest.approx(16 / 2 * found["parameters"], rel=COUNT)


@slow
def test_with_deepspeed_s_own_setting_stage_1_passes_half_as_much_again_as_the_paper(tmp_path):
    config = copy_of(FIVE, tmp_path, ('        "use_multi_rank_bucket_allreduce": false,\n', ""),
                     name="ds_config.json")
    done, found = train(str(config.with_name("main.py")), 2, tmp_path, "--stage", 1, "--max-steps", 5, counting=True)
    assert passed(done.out) == pytest.approx(3 * found["parameters"], rel=COUNT)


@pytest.mark.core
@pytest.mark.parametrize(("chapter", "flags", "ranks"), [
    pytest.param(FIVE, ["--stage", 1], 2, marks=slow),  # stage 2 is laid out as stage 1 is
    (FIVE, ["--stage", 3], 2), (FSDP, ["--precision", "fp64"], 1)])
def test_resume_reaches_the_parameters_of_an_uninterrupted_run(chapter, flags, ranks, plain, tmp_path):
    """DeepSpeed's checkpoint goes on with as many ranks, fsdp.py's with any number."""
    flags = *flags, "--checkpoint"
    train(chapter, 2, tmp_path, *flags, tmp_path / "whole", "--epochs", 2)
    train(chapter, 2, tmp_path, *flags, tmp_path / "c", "--epochs", 1)
    more = *flags, tmp_path / "c", "--epochs", 2, "--resume"
    if chapter == FIVE:
        done, _ = train(chapter, 1, tmp_path, *more, code=2)
        assert re.fullmatch("main.py: cannot continue from .*\n", done.err), done.err
    _, found = train(chapter, ranks, tmp_path, *more)
    assert found["steps"] == STEPS
    apart_by = distance(parameters(tmp_path / "c"), parameters(tmp_path / "whole"))
    kind, bound = ("parameters, fp64", FP64) if chapter == FSDP else ("parameters, fp32", plain["fp32"].bound)
    close(kind, apart_by, bound)


@pytest.mark.parametrize(("chapter", "flags", "said"), [
    (FIVE, "--stage 4", "--stage.*4"),
    (FSDP, "--offload cpu", "no GPU"), (FSDP, "--stage 1 --checkpoint c", "--checkpoint.*--stage 3")])
def test_mistakes_are_one_line(chapter, flags, said, tmp_path):
    done = run(chapter, 1, *flags.split(), cwd=tmp_path)
    assert done.code == 2 and re.fullmatch(f"(main|fsdp).py: .*{said}.*\n", done.err), done.err


@pytest.mark.check
def test_the_paper_s_example(zero):
    """Rajbhandari et al., figure 1: 7.5 billion parameters, 64 ranks, mixed precision, in GB (1e9 bytes)."""
    roles = zero[1].ROLES
    found = [sum(zero[1].formula(stage, 64, 7_500_000_000, 0, width=2, gathered=2, master=4, moments=8,
                                 keeps_gradients=True)[role] for role in roles) / 1e9 for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=ONE_DECIMAL)


@slow
@pytest.mark.parametrize("chapter", [FIVE, FSDP])
def test_ranks_with_more_test_images_than_others_do_not_wait_for_ever(chapter):
    """360 images on 7 ranks, at stage 3, where the ranks gather layers together."""
    flags = "--stage", 3, "--batch-size", 17, "--max-steps", 2, "--width", 32, "--layers", 1
    done = run(chapter, 7, *flags, timeout=100)
    assert done.code == 0 and "of 360 images" in done.out, done.err


@pytest.mark.parametrize("chapter, stage, fits", [(FSDP, 3, True), (FIVE, 0, False)])
def test_stage_3_trains_what_does_not_fit_at_stage_0(chapter, stage, fits):
    """Two ranks, 20 million parameters P, 16 bytes each: room for 13 P, of which stage 3 takes 8 P and a few layers."""
    words = command(chapter, 2, "--stage", stage, "--width", 1024, "--layers", 19, "--max-steps", 2, "--batch-size", 8)
    place = words.index(sys.executable) + 1
    done = execute([*words[:place], PROGRAMS / "roomy.py", 13 * 20_000_000, *words[place:]],
                   env={"MALLOC_MMAP_THRESHOLD_": "1000000"})  # freed memory goes back at once
    assert (done.code == 0) == fits, done.err
    assert fits or "allocate memory" in done.err, done.err


def test_tensors_that_the_accounting_does_not_know_end_no_training(tmp_path):
    """As with another DeepSpeed, whose tensors have other names."""
    moved = "def held_by_deepspeed(*_):\n    raise AttributeError('moved')\n\n\ndef old("
    main = copy_of(FIVE, tmp_path, ("def held_by_deepspeed(", moved), name="accounting.py").with_name("main.py")
    done = run(str(main), 2, *SMALL, "--max-steps", 3, timeout=100)
    assert done.code == 0 and "test accuracy" in done.out, done.err
    assert len(re.findall("no table of bytes: AttributeError: moved", done.out)) == 1, done.out


def test_activation_checkpointing_as_the_page_shows_it():
    """A block keeps its input alone, and the gradients are the same bits."""
    page = (ROOT / FIVE / "README.md").read_text()
    lines = re.search(r"```python\n(from functools.+?)```", page, re.S)[1]
    images, kept, gradients = torch.randn(32, 8, dtype=torch.float64), [], []

    def keep(tensor):
        if tensor.shape == images.shape:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    for code in "", lines:
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU())
                  for _ in range(3)]
        exec(code, {"blocks": blocks})
        model, sizes = torch.nn.Sequential(*blocks).double(), {}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = model(images)
        logits.sum().backward()
        kept.append(sum(sizes.values()))
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert kept == [7 * images.nbytes, 3 * images.nbytes]
    assert all(map(torch.equal, *gradients))
