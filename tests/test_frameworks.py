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
SCRIPTS = [pytest.param("lightning_script.py", marks=pytest.mark.slow), "accelerate_script.py",
           pytest.param("trainer_script.py", marks=pytest.mark.slow)]
SAME_ORDER = {  # changes for one rank, so that it sees the order of two
    "lightning_script.py": [
        ("shuffle=True", "sampler=torch.utils.data.DistributedSampler(train, 1, 0, seed=0)")]}


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """Let the ranks, which inherit this process's path, import the frameworks."""
    monkeypatch.syspath_prepend(PACKAGES)


def train(script, ranks, folder, *changes):
    """Train a changed copy of a script with a global batch of 64, two ranks under agree.

    Return the weights that it saved, and the output.
    """
    program = copy_and_edit("tests/frameworks", folder, ("RANKS = 1", f"RANKS = {ranks}"), *changes,
                            name=script)
    arguments = [AGREE, "--steps", 1000, program] if ranks > 1 else [program]
    result = forked.run(arguments, ranks, ENVIRONMENT, timeout=180, cwd=folder)
    assert result.code == 0, result.out + result.err
    return torch.load(folder / "digits.pt"), result.out


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks_train_as_one_and_agree_finds_nothing_wrong(script, tmp_path):
    expected, _ = train(script, 1, tmp_path / "one", *SAME_ORDER.get(script, []))
    weights, output = train(script, 2, tmp_path / "two")
    assert "no problems found" in output, output
    assert_equal_in_fp64(weights, expected)
