"""05_zero/two_d.py trains as one rank does."""

from types import SimpleNamespace

import numpy as np
import pytest
from conftest import assert_refused, numbers, run
from test_zero import FSDP, plain_loop, train
from tolerances import FP64, assert_close

from tools.measuring.parameters import named_parameters

TWO_D = "05_zero/two_d.py"


def train_in_fp64(program, ranks, folder, *flags):
    """Train the smooth variant. Return its record and its parameters by name."""
    record = train(program, ranks, folder, "--precision", "fp64", "--checkpoint", folder / "c",
                   *flags)
    return record, named_parameters(folder / "c")


def assert_equal(parameters, expected):
    assert parameters.keys() == expected.keys()
    for name, value in expected.items():
        difference = np.abs(parameters[name] - value)
        assert_close(f"{name}, fp64", difference.max(), FP64)


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_by_two")
    record, weights = train_in_fp64(TWO_D, 4, folder, "--epochs", 1, "--tensor", 2)
    return SimpleNamespace(folder=folder, record=record, parameters=weights)


@pytest.mark.core
@numbers
def test_two_by_two_ranks_train_as_a_plain_loop(two_by_two):
    expected = plain_loop()["fp64"]
    assert_close("loss, fp64, relative", abs(two_by_two.record["loss"] / expected.loss - 1), FP64)
    assert_equal(two_by_two.parameters, expected.named_parameters)


@numbers
def test_fsdp_continues_on_one_rank(two_by_two, tmp_path):
    _, whole = train_in_fp64(FSDP, 1, tmp_path, "--epochs", 2)
    _, resumed = train_in_fp64(FSDP, 1, two_by_two.folder, "--epochs", 2, "--resume")
    assert_equal(resumed, whole)


@pytest.mark.parametrize(("ranks", "flags"), [
    (1, "--tensor 2"), (2, "--tensor 2 --heads 3")])
def test_mistakes_get_one_line(ranks, flags):
    assert_refused(run(TWO_D, ranks, *flags.split()), "--tensor 2 has to divide --heads, --context")
