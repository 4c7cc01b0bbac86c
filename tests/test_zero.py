"""Chapter 5: every stage is the same training, and holds the bytes that the formulae say."""

import gc
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
from conftest import (
    NO_NETWORK,
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
from launch import command
from sklearn.datasets import load_digits
from test_contract import check
from test_equality import TWICE
from tolerances import COUNT, FP64, LOSS, ONE_DECIMAL, ROOM, TIES, apart, close, distance

from tools.measuring.collectives import passed

FIVE, FSDP = "05_zero", "05_zero/fsdp.py"
SMALL = "--width", 256, "--layers", 8, "--global-batch-size", 64  # 0.5 M parameters
STEPS = 1437 // 64  # an epoch, of which the accounting looks at the second and counted.py at the fourth
COUNTED = PROGRAMS / "counted.py"
TWIN = {"TWIN": "smooth"}
RATE = 2.0  # --lr of the twin, whose Adam divides by 1 and not by the size of a gradient
CASES = [(FIVE, stage) for stage in range(4)] + [(FSDP, 1), (FSDP, 3)]


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
    done = forked.run([COUNTED, *words] if counting else [OBSERVED, folder, *words], ranks, environment() | TWIN)
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


def shares(sizes, ranks):
    """Elements of the tensors that lie wholly or partly in each of equal shares of them all, laid end to end.

    A share is a multiple of 2; what that adds at the end is in the last.
    """
    share = math.ceil(sum(sizes) / (2 * ranks)) * 2
    sizes = [*sizes, ranks * share - sum(sizes)]
    ends = list(accumulate(sizes))
    return [sum(size for size, end in zip(sizes, ends) if end - size < (rank + 1) * share and end > rank * share)
            for rank in range(ranks)]


def expect_bytes(found, stage, ranks, zero):
    """Within 1 % of the formula on every rank; where it is not, why not, exactly."""
    sizes = [p.numel() for p in zero[0].build_model(256, 8, torch.zeros(1, 1, 8, 8)).parameters()]
    formula, whole = found["memory_formula"], shares(sizes, ranks)
    assert len(found["memory"]) == ranks
    for rank, counted in enumerate(found["memory"]):
        for name, expected in formula.items():
            if name == "gradients" and found["chapter"] == FIVE and stage in (1, 2) and ranks > 1:
                assert counted[name] == 4 * whole[rank]  # a tensor that lies in two shares is whole on both
                continue
            if name == "optimizer state" and found["chapter"] == FSDP and stage == 1:
                continue  # whole tensors are dealt out: uneven, but all are there (below)
            if name == "peak parameters" and found["chapter"] == FSDP and stage == 3 and ranks == 1:
                expected += 4 * (256 * 256 + 256)  # FSDP gathers a layer on one rank too
            tolerance = 4 * 2 * (256 * 256 + 256) if name == "peak gradients" else COUNT * expected
            assert abs(counted[name] - expected) <= tolerance, (rank, name, counted[name], expected)
    if found["chapter"] == FSDP and stage == 1:
        state = [counted["optimizer state"] for counted in found["memory"]]
        assert sum(state) == pytest.approx(ranks * formula["optimizer state"], rel=COUNT)
        assert ranks == 1 or max(state) > 1.02 * min(state)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=numbers), 4])
@pytest.mark.parametrize(("chapter", "stage"), CASES)
def test_a_stage_is_the_plain_training_and_holds_its_bytes(chapter, stage, ranks, plain, zero, tmp_path):
    checkpoint = [] if (chapter, stage) == (FSDP, 1) else ["--checkpoint", tmp_path / "c"]
    done, found = train(chapter, ranks, tmp_path, "--stage", stage, "--epochs", 1, *checkpoint,
                        counting=ranks == 2)
    if ranks == 2:
        if (chapter, stage) == (FIVE, 0):  # one all-reduce, of all gradients
            assert len(re.findall(r'"gloo:all_reduce", \[\[\d+', done.out)) == 1
        times = 3 if stage == 3 or checkpoint == [] else 2  # ZeroRedundancyOptimizer broadcasts what it has updated
        assert passed(done.out) == pytest.approx(times * found["parameters"], rel=COUNT)
        over_gloo = passed(done.out, reduce_scatter=False)  # it has none: an all-reduce in its place
        assert over_gloo == pytest.approx((times + (stage == 3)) * found["parameters"], rel=COUNT)
    one = plain["fp32"]
    close("loss, fp32, relative", abs(found["loss"] / one.loss - 1), LOSS)
    if checkpoint:
        close("parameters, fp32", distance(parameters(tmp_path / "c"), one.parameters), one.bound)
    expect_bytes(found, stage, ranks, zero)


@pytest.mark.parametrize(("stage", "ranks"), [
    pytest.param(1, 2, marks=numbers), pytest.param(3, 2, marks=numbers), (3, 1), (3, 4)])
def test_fsdp_in_fp64_is_exact(stage, ranks, plain, tmp_path):
    checkpoint = ["--checkpoint", tmp_path / "c"] * (stage == 3)
    _, found = train(FSDP, ranks, tmp_path, "--precision", "fp64", "--stage", stage, "--epochs", 1, *checkpoint)
    one = plain["fp64"]
    close("loss, fp64, relative", abs(found["loss"] / one.loss - 1), FP64)
    if checkpoint:
        close("parameters, fp64", abs(parameters(tmp_path / "c") - one.parameters).max(), FP64)


HALF_THE_MOMENTUM = """            for state in {}.state.values() if rank == 1 else []:
                state["exp_avg"].mul_(0.5)
"""


@numbers
@pytest.mark.parametrize(("chapter", "flags", "line", "changed"), [
    (FIVE, ["--stage", 2], "(train, world_size, rank,", "(train, world_size, 0,"),
    (FIVE, ["--stage", 1], "engine.backward(loss)", "engine.backward(2 * loss)"),
    (FIVE, ["--stage", 2], "            engine.step()", HALF_THE_MOMENTUM.format("adam") + "            engine.step()"),
    (FIVE, ["--stage", 3], *TWICE),
    (FSDP, ["--precision", "fp64"], "loss.backward()", "(2 * loss).backward()"),
    (FSDP, ["--precision", "fp64"], "            optimizer.step()",
     HALF_THE_MOMENTUM.format("optimizer") + "            optimizer.step()"),
    (FSDP, ["--precision", "fp64"], *TWICE),
], ids=["the same images", "twice the gradients", "a wrong share of the state", "an image seen twice",
        "FSDP: twice the gradients", "FSDP: a wrong share of the state", "FSDP: an image seen twice"])
def test_the_check_notices_what_makes_a_difference(chapter, flags, line, changed, plain, tmp_path):
    main = copy_of(FIVE, tmp_path / "copy", (line, changed), name="fsdp.py" if chapter == FSDP else "main.py")
    train(str(main), 2, tmp_path, *flags, "--epochs", 1, "--checkpoint", tmp_path / "c")
    one = plain["fp64" if chapter == FSDP else "fp32"]
    kind, bound = ("parameters, fp64", FP64) if chapter == FSDP else ("parameters, fp32", one.bound)
    apart(kind, distance(parameters(tmp_path / "c"), one.parameters), bound)


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


def test_with_deepspeed_s_own_setting_stage_1_passes_half_as_much_again_as_the_paper(tmp_path):
    config = copy_of(FIVE, tmp_path, ('        "use_multi_rank_bucket_allreduce": false,\n', ""),
                     name="ds_config.json")
    done, found = train(str(config.with_name("main.py")), 2, tmp_path, "--stage", 1, "--max-steps", 5, counting=True)
    assert passed(done.out) == pytest.approx(3 * found["parameters"], rel=COUNT)


@pytest.mark.parametrize(("stage", "times"), [(1, 2), (2, 5)])
def test_with_four_micro_batches_stage_2_reduces_four_times(stage, times, tmp_path):
    config = copy_of(FIVE, tmp_path, ('"gradient_accumulation_steps": 1', '"gradient_accumulation_steps": 4'),
                     name="ds_config.json")
    main, flags = str(config.with_name("main.py")), ("--stage", stage, "--max-steps", 5)
    done, found = train(main, 2, tmp_path, *flags, counting=True)
    assert passed(done.out) == pytest.approx(times * found["parameters"], rel=COUNT)


@pytest.mark.parametrize("stage", [1, 3])  # stage 2 is laid out as stage 1 is
def test_deepspeed_s_checkpoint_goes_on_with_as_many_ranks(stage, plain, tmp_path):
    flags = "--stage", stage, "--checkpoint"
    train(FIVE, 2, tmp_path, *flags, tmp_path / "whole", "--epochs", 2)
    train(FIVE, 2, tmp_path, *flags, tmp_path / "c", "--epochs", 1)
    done, _ = train(FIVE, 1, tmp_path, *flags, tmp_path / "c", "--epochs", 2, "--resume", code=2)
    assert re.fullmatch("main.py: cannot continue from .*\n", done.err), done.err
    _, found = train(FIVE, 2, tmp_path, *flags, tmp_path / "c", "--epochs", 2, "--resume")
    assert found["steps"] == STEPS
    close("parameters, fp32", distance(parameters(tmp_path / "c"), parameters(tmp_path / "whole")), plain["fp32"].bound)


def test_fsdp_s_checkpoint_goes_on_with_any_number_of_ranks(tmp_path):
    flags = "--precision", "fp64", "--checkpoint"
    train(FSDP, 2, tmp_path, *flags, tmp_path / "whole", "--epochs", 2)
    train(FSDP, 2, tmp_path, *flags, tmp_path / "c", "--epochs", 1)
    for ranks in 1, 2, 4:
        shutil.copytree(tmp_path / "c", tmp_path / f"{ranks}")
        _, found = train(FSDP, ranks, tmp_path, *flags, tmp_path / f"{ranks}", "--epochs", 2, "--resume", "auto")
        assert found["steps"] == STEPS
        close("parameters, fp64", abs(parameters(tmp_path / f"{ranks}") - parameters(tmp_path / "whole")).max(), FP64)


@pytest.mark.parametrize(("chapter", "flags", "said"), [
    (FIVE, "--stage 4", "--stage.*4.*0, 1, 2, 3"), (FSDP, "--stage 2", "--stage.*2.*1, 3"),
    (FIVE, "--width 0", "--width.*above 0"),
    (FIVE, "--offload cpu", "no GPU"), (FSDP, "--offload cpu", "no GPU"),
    (FSDP, "--stage 1 --checkpoint {}/c", "--checkpoint.*--stage 3"),
    (FIVE, "--checkpoint {} --resume", "there is no checkpoint"),
    (FSDP, "--checkpoint {}/none --resume", "there is no checkpoint .*none")])
def test_mistakes_are_one_line(chapter, flags, said, tmp_path):
    done = run(chapter, 2 if "resume" in flags else 1, *flags.format(tmp_path).split())
    assert done.code == 2 and re.fullmatch(f"(main|fsdp).py: .*{said}.*\n", done.err), done.err


@pytest.mark.parametrize(("chapter", "share"), [
    (FIVE, "zero_pp_rank_1_mp_rank_00_optim_states.pt"), (FSDP, "__1_0.distcp")])
def test_a_share_that_is_cut_off_is_one_line_and_no_hang(chapter, share, tmp_path):
    flags = "--checkpoint", tmp_path / "c"
    train(chapter, 2, tmp_path, *flags, "--epochs", 1)
    os.truncate(tmp_path / "c" / f"step{STEPS}" / share, 5000)
    done = run(chapter, 2, *SMALL, *flags, "--resume", timeout=100)
    assert done.code == 2 and re.fullmatch("(main|fsdp).py: cannot continue from .*\n", done.err), done.err


def test_two_runs_at_once_do_not_collide(tmp_path):
    words = [str(word) for word in command(FIVE, 2, *SMALL, "--max-steps", 3, "--results", tmp_path / "results")]
    both = [subprocess.Popen(words, env=environment() | NO_NETWORK, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=100) for process in both] == [0, 0]
    for found in lines(tmp_path / "results"):
        extra = {"stage", "offload", "memory", "memory_formula", "width", "layers"}
        check({name: value for name, value in found.items() if name not in extra})


def test_the_accounting_fails_loudly(zero):
    model, device = torch.nn.Linear(100, 100), torch.device("cpu")
    held = {role: list(model.parameters()) for role in ("parameters", "master copy")}
    held |= {"gradients": [torch.ones(100, 100)], "optimizer state": [torch.ones(100, 100)]}

    def account(groups):
        accounting = zero[1].Accounting(model, lambda: groups, [], device)
        accounting.close()
        return accounting.bytes

    with pytest.raises(RuntimeError, match="finds no gradients"):
        account(held | {"gradients": [None]})
    bucket = [torch.ones(10_000_000)]
    threading.Timer(0.3, bucket.clear).start()  # as gloo's thread lets go of it
    assert account(held)["unclassified"] < 1e6
    lost = torch.ones(10_000_000)  # what DeepSpeed would hold under a new name
    with pytest.raises(RuntimeError, match="cannot place"):
        account(held)
    counted = account(held | {"buckets": [tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor]})
    assert counted["parameters"] == 40_400 and counted["master copy"] == 0 and lost.numel()


def test_the_paper_s_example(zero):
    """Rajbhandari et al., figure 1: 7.5 billion parameters, 64 ranks, mixed precision, in GB (1e9 bytes)."""
    roles = zero[1].ROLES
    found = [sum(zero[1].formula(stage, 64, 7_500_000_000, 0, width=2, gathered=2, master=4, moments=8,
                                 keeps_gradients=True)[role] for role in roles) / 1e9 for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=ONE_DECIMAL)


def test_weights_of_zero_are_plain_weights_for_chapter_1(tmp_path):
    """Chapter 4 with ZeRO in its file; zero_to_fp32, which DeepSpeed leaves in the folder; chapter 1's evaluation."""
    copy_of("04_deepspeed", tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps({
        "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2}}))
    flags = "--global-batch-size", 64, "--epochs", 1, "--checkpoint"
    on_two = run(str(tmp_path / "main.py"), 2, *flags, tmp_path / "zero")
    assert on_two.code == 0, on_two.err
    script = ("import sys, torch; from zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as merge; "
              "torch.save({name: tensor.detach() for name, tensor in merge('.').items()}, 'plain')")
    done = execute([sys.executable, "-c", script], cwd=tmp_path / "zero")  # the script itself wants huggingface_hub
    assert done.code == 0, done.err
    assert run("01_single_node", 1, *flags, tmp_path / "one").code == 0
    checkpoint = torch.load(tmp_path / "one")
    checkpoint["model"] = torch.load(tmp_path / "zero" / "plain")
    torch.save(checkpoint, tmp_path / "one")
    on_one = run("01_single_node", 1, *flags, tmp_path / "one", "--resume")
    right = [int(re.search(r"\((\d+) of 360", done.out)[1]) for done in (on_one, on_two)]
    assert abs(right[0] - right[1]) <= TIES


def test_copies_elsewhere_run_and_need_no_compiler(tmp_path):
    hidden = {"PATH": str(Path(sys.executable).parent), "CXX": "", "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")}
    for name in "main.py", "fsdp.py":
        main = copy_of(FIVE, tmp_path / name, name=name)
        done = execute([sys.executable, main.name, *SMALL, "--max-steps", 2], cwd=main.parent, env=hidden)
        assert done.code == 0 and not done.err, done.err
    assert not (tmp_path / "compiled").exists()


def test_help_lists_every_flag():
    flags = [set(re.findall(r"--[a-z-]+", run(chapter, 1, "--help").out))
             for chapter in (FIVE, FSDP, "04_deepspeed")]
    assert flags[0] == flags[1] == flags[2] - {"--model"} | {"--stage", "--width", "--layers", "--offload"}


@pytest.mark.parametrize("chapter", [FIVE, FSDP])
def test_ranks_with_more_test_images_than_others_do_not_wait_for_ever(chapter):
    """360 images on 7 ranks, at stage 3, where the ranks gather layers together."""
    flags = "--stage", 3, "--batch-size", 17, "--max-steps", 2, "--width", 32, "--layers", 1
    done = run(chapter, 7, *flags, timeout=100)
    assert done.code == 0 and "of 360 images" in done.out, done.err
