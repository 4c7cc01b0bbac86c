"""Lightning, accelerate and Hugging Face's Trainer: 2 ranks train as 1, and what agree says."""

import sys
from pathlib import Path

import forked
import pytest
import torch
from conftest import ROOT, copy_and_edit, environment
from tolerances import assert_equal_in_fp64

AGREE = ROOT / "agree" / "agree" / "__main__.py"
PACKAGES = Path(sys.prefix, "frameworks")  # set-up installs them there: nothing else imports them
ENVIRONMENT = environment() | {"ACCELERATE_USE_CPU": "true"}
FLAGS = {"lightning_script": ["--devices", 2], "accelerate_script": [], "trainer_script": []}

SAME_ORDER = {  # changes for one rank, so that it sees the order of two
    "lightning_script": [
        ("shuffle=True", "sampler=torch.utils.data.DistributedSampler(train, 1, 0, seed=0)")]}


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Let the ranks, which inherit this process's path, import the frameworks."""
    monkeypatch.syspath_prepend(PACKAGES)


def train(script, ranks, folder, *changes):
    """Train a changed copy of a script with a global batch of 64, two ranks under agree.

    Return the weights that it saved, and the output.
    """
    program = copy_and_edit("tests/frameworks", folder, *changes, name=f"{script}.py")
    arguments = [program, "--weights", folder / "weights.pt", "--batch-size", 64 // ranks]
    if ranks > 1:
        arguments = [AGREE, "--steps", 1000, *arguments, *FLAGS[script]]
    result = forked.run(arguments, ranks, ENVIRONMENT, timeout=180, cwd=folder)
    assert result.code == 0, result.out + result.err
    return torch.load(folder / "weights.pt"), result.out


@pytest.mark.parametrize("script", FLAGS)
def test_two_ranks_train_as_one_and_agree_finds_nothing_wrong(script, tmp_path):
    expected, _ = train(script, 1, tmp_path / "one", *SAME_ORDER.get(script, []))
    weights, output = train(script, 2, tmp_path / "two")
    assert "no problems found" in output, output
    assert_equal_in_fp64(weights, expected)
