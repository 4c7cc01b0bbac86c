"""Lightning, accelerate and Hugging Face's Trainer: 2 ranks train as 1, and what agree says."""

import shutil
import sys
from pathlib import Path

import forked
import pytest
import torch
from conftest import ROOT, copy_and_edit, environment
from tolerances import FP64, assert_close, assert_far_apart

AGREE = ROOT / "agree" / "agree" / "__main__.py"
PACKAGES = Path(sys.prefix, "frameworks")  # set-up installs them there: nothing else imports them
ENVIRONMENT = environment() | {"ACCELERATE_USE_CPU": "true"}
NO_PROBLEMS = "no problems found"
FLAGS = {"lightning_script": ["--devices", 2], "accelerate_script": [], "trainer_script": []}

LOADER = "shuffle=True, drop_last=True"
SAME_ORDER = {  # changes for one rank, so that it sees the order of two
    "lightning_script": [
        ("shuffle=True", "sampler=torch.utils.data.DistributedSampler(train, 1, 0, seed=0)")]}
MISTAKES = {  # {script: {case: (changes, agree's finding)}}
    "lightning_script": {
        "the sampler is not replaced": (
            [("logger=False", "logger=False, use_distributed_sampler=False")], "same data"),
        "one device for two ranks": ([("devices=args.devices", "devices=1")], "alone"),
        "a split without a seed": ([("L.seed_everything(0)", "torch.seed()")], "overlap")},
    "accelerate_script": {
        "the loader is not prepared": (
            [("model, optimizer, train_loader, test_loader, scheduler = acc",
              "model, optimizer, test_loader, scheduler = acc"),
             ("model, optimizer, train_loader, test_loader, scheduler)",
              "model, optimizer, test_loader, scheduler)")], "same data"),
        "the model is not prepared": (
            [("    optimizer = torch.optim", "    plain = model\n    optimizer = torch.optim"),
             ("cross_entropy(model(images)", "cross_entropy(plain(images)")], "own gradients")},
    "trainer_script": {
        "a loader of one's own": (
            [("    trainer.train()", "    trainer.get_train_dataloader = lambda: DataLoader(\n"
              "        data[:1436], args.batch_size, shuffle=True)\n    trainer.train()"),
             ("import torch\n", "import torch\nfrom torch.utils.data import DataLoader\n")],
            "same data"),
        "an order per rank": (
            [("    data = load()\n", "    import os\n    data = load()\n"
              "    torch.manual_seed(int(os.environ['RANK']))\n"
              "    data = [data[index] for index in torch.randperm(1797)]\n"
              "    torch.manual_seed(0)\n")], "overlap")},
}
MISSED = {  # changes to trainer_script.py
    "tokens averaged per rank": ("dataloader_drop_last=True", "dataloader_drop_last=True,\n"
                                 "        average_tokens_across_devices=False")}
SAVE_STEPS = ('save_strategy="no"', 'save_strategy="steps", save_steps=4')
SAVE_MID_EPOCH = ("enable_checkpointing=False", "callbacks=L.pytorch.callbacks.ModelCheckpoint("
                  "'checkpoints', '{step}', every_n_train_steps=11, save_top_k=-1)")


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Let the ranks, which inherit this process's path, import the frameworks."""
    monkeypatch.syspath_prepend(PACKAGES)


def train(script, ranks, folder, *changes, steps=1000):
    """Train a changed copy of a script with a global batch of 64, two ranks under agree.

    Return the weights that it saved, or None, and the result of forked.run().
    """
    program = copy_and_edit("tests/frameworks", folder, *changes, name=f"{script}.py")
    arguments = [program, "--weights", folder / "weights.pt", "--batch-size", 64 // ranks]
    if ranks > 1:
        arguments = [AGREE, "--steps", steps, *arguments, *FLAGS[script]]
    result = forked.run(arguments, ranks, ENVIRONMENT, timeout=180, cwd=folder)
    weights = folder / "weights.pt"
    return torch.load(weights) if weights.exists() else None, result


def largest_difference(weights, expected):
    assert weights.keys() == expected.keys()
    return max((weights[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize("script", FLAGS)
def test_two_ranks_train_as_one_and_agree_finds_nothing_wrong(script, tmp_path):
    expected, one = train(script, 1, tmp_path / "one", *SAME_ORDER.get(script, []))
    assert one.code == 0, one.err
    weights, two = train(script, 2, tmp_path / "two")
    assert two.code == 0 and NO_PROBLEMS in two.out, two.out + two.err
    assert_close("parameters, fp64", largest_difference(weights, expected), FP64)
    if script == "lightning_script":  # its sampler repeats an image in the evaluation
        assert "validation: 361" in one.out and "validation: 362" in two.out
    if script == "accelerate_script":
        assert "gather: 364, gather_for_metrics: 361" in two.out
        assert "scheduler's steps: 22" in one.out and "scheduler's steps: 44" in two.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "name"), [(script, name) for script, cases in MISTAKES.items() for name in cases])
def test_agree_names_the_mistake(script, name, tmp_path):
    changes, finding = MISTAKES[script][name]
    _, result = train(script, 2, tmp_path / "two", *changes, steps=5)
    assert result.code == 1, result.out + result.err
    assert f"WRONG: {finding}" in result.out and " 5 steps" in result.out, result.out


@pytest.mark.slow
@pytest.mark.parametrize("name", MISSED)
def test_agree_does_not_see(name, tmp_path):
    expected, _ = train("trainer_script", 1, tmp_path / "one")
    weights, two = train("trainer_script", 2, tmp_path / "two", MISSED[name])
    assert two.code == 0 and NO_PROBLEMS in two.out, two.out + two.err
    assert_far_apart(name, largest_difference(weights, expected), FP64)


def train_and_resume(script, folder, save, call, resumed_call, checkpoints):
    """Return the weights of a whole training and of a resumed one, and the latter's messages."""
    expected, whole = train(script, 1, folder / "whole", save)
    assert whole.code == 0, whole.err
    shutil.copytree(folder / "whole" / checkpoints, folder / "resumed" / checkpoints)
    weights, resumed = train(script, 1, folder / "resumed", save, (call, resumed_call))
    assert resumed.code == 0, resumed.err
    return expected, weights, resumed.err


@pytest.mark.slow
def test_trainer_resumes_in_the_middle_of_an_epoch(tmp_path):
    expected, weights, _ = train_and_resume(
        "trainer_script", tmp_path, SAVE_STEPS, "trainer.train()",
        'trainer.train(resume_from_checkpoint="results/checkpoint-4")', "results")
    assert largest_difference(weights, expected) == 0


@pytest.mark.slow
def test_lightning_starts_the_epoch_again_and_warns(tmp_path):
    expected, weights, messages = train_and_resume(
        "lightning_script", tmp_path, SAVE_MID_EPOCH, "test_loader)\n    if",
        'test_loader, ckpt_path="checkpoints/step=11.ckpt", weights_only=False)\n    if',
        "checkpoints")
    assert "your dataloader is not resumable" in messages
    assert_far_apart("resumed", largest_difference(weights, expected), FP64)
