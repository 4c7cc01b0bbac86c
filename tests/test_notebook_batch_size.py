"""What batch_size.ipynb computes is what independent computation gives, and its sentences follow their numbers."""

import json
import sys
from itertools import product
from math import inf

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import ROOT, execute, numbers
from tolerances import THREE_DIGITS
from torch.nn.functional import cross_entropy

from tools.notebooks import batch_size as course

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as the search has it
AS_MAIN_PY = """
import json, sys
from tools.measuring.steps_to_target import training
for step, loss, accuracy in training(batch=64, rate=0.05, seed=3):
    if step == 22:
        print(json.dumps(accuracy))
        break
"""


def records(*rows):
    """Records of the search from (batch, rate, steps of the seeds)."""
    found = pd.DataFrame(rows, columns=["batch", "rate", "steps"])
    return found.assign(limit=500)


def ruled(linear, constant, best=(50, 50, 50)):
    """A base of 8 with its best rate 1, and what the two rules and the best rate give at batch 16."""
    base = (8, 1, [100, 100, 100]), (8, 2, [inf, inf, inf])
    return records(*base, (16, 2, linear), (16, 1, constant), (16, 1.5, best))


def test_the_search_trains_as_main_py_does(tmp_path):
    """After the first epoch, in separate processes: both have a main.py to import."""
    flags = ["--device", "cpu", "--epochs", "1", "--seed", "3", "--results", str(tmp_path / "record")]
    done = execute([sys.executable, "main.py", *flags], env=ONE_THREAD, cwd=ROOT / "01_single_node")
    assert done.code == 0, done.err
    found = execute([sys.executable, "-c", AS_MAIN_PY], env=ONE_THREAD, cwd=ROOT)
    assert found.code == 0, found.err
    assert json.loads(found.out) == json.loads((tmp_path / "record").read_text())["test_accuracy"]


def test_the_fit_finds_the_law_that_made_the_steps():
    batches = np.array([8, 16, 32, 64, 128, 256, 512])
    fewest, critical = course.fit(pd.Series(30 * (1 + 45 / batches), index=batches))
    assert (fewest, critical) == pytest.approx((30, 45))
    assert course.law(45, 30, 45) == pytest.approx(60), "at the bend twice the fewest"


def test_medians_and_best_rates_count_seeds_without_the_target_as_infinite():
    found = records((8, 1, [10, inf, 12]), (8, 2, [5, inf, inf]), (16, 1, [9, 7, 8]))
    steps = course.medians(found)
    assert steps.loc[1, 8] == 12 and steps.loc[2, 8] == inf and steps.loc[1, 16] == 8 and np.isnan(steps.loc[2, 16])
    top = course.best(found)
    assert list(top.rate) == [1, 1] and list(top.steps) == [12, 8]
    assert (top.least[16], top.most[16], top.epochs[16]) == (7, 9, 8 * 16 / 1437)


def test_every_best_rate_of_the_records_lies_within_its_grid():
    found = course.searched()
    for batch, row in course.best(found).iterrows():
        rates = found[found.batch == batch].rate
        assert rates.min() < row.rate < rates.max()


def test_the_noise_formula_is_the_mean_over_all_batches():
    """Of 6 numbers, over all ordered batches of 3 without replacement."""
    values = np.array([0.0, 1, 5, 2, 2, 9])
    means = [np.mean(values[list(chosen)]) for chosen in product(range(6), repeat=3) if len(set(chosen)) == 3]
    assert course.noise(3, values.var(), 6) == pytest.approx(np.mean((np.array(means) - values.mean()) ** 2))
    assert course.noise(6, values.var(), 6) == 0


@numbers
def test_the_gradient_of_a_batch_is_the_mean_of_its_images():
    torch.manual_seed(0)
    model = course.chapter.build_model("cnn", course.digits()[0]).double()
    images, labels = course.digits()
    total = 0
    for image in range(4):
        model.zero_grad()
        cross_entropy(model(images[image:image + 1].double()), labels[image:image + 1]).backward()
        total = total + torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    together = course.gradient(model.float(), torch.arange(4))
    assert torch.linalg.norm(together - total / 4) < THREE_DIGITS * torch.linalg.norm(total / 4)


def test_gains_are_of_doublings_within_a_repeat():
    speeds = pd.DataFrame({64: [100.0, np.nan], 128: [150.0, 200], 256: [75.0, 300]})
    assert course.gains(speeds)[128][0] == pytest.approx(50)
    assert list(course.gains(speeds)[256]) == pytest.approx([-50, 50])
    assert "5 of 6 runs" in course.on_throughput(speeds)


@pytest.mark.parametrize("after, said", [([110, 120], "all repeats gain to 128"), ([90, 80], "all repeats lose to 128"),
                                         ([90, 120], ": to 128 (+5 %, -10 to +20 %) no gain can be told, for the")])
def test_what_is_said_of_throughput(after, said):
    text = course.on_throughput(pd.DataFrame({64: [100.0, 100], 128: after}))
    assert said in text and text.count("128") == 1


@pytest.mark.parametrize("steps, said", [((100, 50, 40), "8 to 16 by 2.0 and from 16 to 32 by 1.2"),
                                         ((100, 100, 200), "8 to 16 by 1.0 and from 16 to 32 by 0.5")])
def test_what_is_said_of_steps(steps, said):
    top = course.best(records(*((8 * 2**power, 1, [n] * 3) for power, n in enumerate(steps))))
    assert said in course.on_steps(top) and "The epochs rise: " in course.on_steps(top)
    falling = course.best(records((8, 1, [100] * 3), (16, 1, [40] * 3)))
    assert "do not rise" in course.on_steps(falling)


def bent(spread=0):
    """Records that bend at 45, from whose law the seeds are off by this share of the steps at most."""
    return records(*((batch, 1, [30 * (1 + 45 / batch) * (1 + spread * seed) for seed in (-1, 0, 1)])
                     for batch in (8, 64, 512)))


@pytest.mark.parametrize("scales, said, not_said", [
    ((15, 90), "at most a factor of 3.0 away; they differ by a factor of 6.0", "not of their order"),
    ((90, 95), "at most a factor of 2.1 away.", "differ"),
    ((900, 90), "is not of their order: one of them is a factor of 20 away.", "at most"),
    ((3, 40), "is not of their order: one of them is a factor of 15 away.", "at most")])
def test_what_is_said_of_the_bend(scales, said, not_said):
    text = course.on_bend(bent(), dict(enumerate(scales)))
    assert said in text and not_said not in text and "at a batch of 45 (45 to 45 for" in text


def test_the_range_of_the_bend_is_that_of_the_seeds():
    assert course.refitted(bent()) == pytest.approx((45, 45))
    least, most = course.refitted(bent(0.2))
    assert course.refitted(bent(0.4))[0] < least < 45 < most < course.refitted(bent(0.4))[1]


def test_what_is_said_of_the_law():
    """Against the steps 1 + 1 / B, of B = 1, 2, 4 and 8 bends."""
    assert "2 times the fewest" in course.on_law() and "divide the steps by 1.33, 1.20 and 1.11." in course.on_law()


@pytest.mark.parametrize("linear, constant, said, not_said", [
    ([50, 51, 52], [90, 91, 92], "fewer steps than with the constant rate at 16", "takes more"),
    ([90, 91, 92], [55, 56, 57], "every seed takes more steps than with the constant rate at 16", "fewer"),
    ([50, 60, 90], [55, 56, 80], "the seeds overlap at 16", "every seed"),
    ([60, inf, inf], [90, 91, 92], "batch 8, most seeds do not reach the target at 16", "overlap")])
def test_what_is_said_of_the_rules(linear, constant, said, not_said):
    text = course.on_rules(ruled(linear, constant), 8)
    assert said in text and not_said not in text


def test_how_far_a_rule_keeps_up():
    assert "up to batch 16" in course.on_rules(ruled([60] * 3, [90] * 3), 8)
    assert "up to batch 8" in course.on_rules(ruled([63] * 3, [90] * 3), 8)
    assert "from 8 at no larger one" in course.on_starts(ruled([inf] * 3, [90] * 3), [8])
    assert "from 8 up to 16" in course.on_starts(ruled([50] * 3, [90] * 3), [8])


@pytest.mark.parametrize("middle, high, said", [
    (50, 80, "up to batch 8 only, and every seed takes fewer steps than with the constant rate at no batch: how far"),
    (90, 50, "up to batch 16, and every seed takes fewer steps than with the constant rate at 16: how far"),
    (60, 50, "keeps up as far, and every seed takes fewer steps than with the constant rate at 16.")])
def test_what_is_said_of_a_tie(middle, high, said):
    """Of the rates 1 and 2 at batch 8, whose linear rules go to 2 and to 4 at batch 16."""
    base = (8, 1, [90, 100, 110]), (8, 2, [100] * 3)
    text = course.on_tie(records(*base, (16, 1, [95] * 3), (16, 2, [middle] * 3), (16, 4, [high] * 3)), 8)
    assert "the rates 1 and 2 tie" in text and said in text
    assert course.on_tie(ruled([50] * 3, [90] * 3), 8) == ""


def test_what_is_said_of_the_best_rates():
    """The linear rule goes 1, 2, 4; the best rates 1, 2, 1 and 1, 0.9, 1."""
    first, last = (8, 1, [100] * 3), (32, 1, [50] * 3)
    text = course.on_rates(records(first, (16, 2, [60] * 3), last), 8)
    assert "best rate at 8 and 16; from 8 on the best rates lie between 1 and 2." in text
    text = course.on_rates(records(first, (16, 0.9, [60] * 3), last), 8)
    assert "best rate at 8; from 8 on the best rates lie between 0.9 and 1." in text
    text = course.on_rates(records(first, (16, 3, [60] * 3), (32, 6, [50] * 3)), 8)
    assert "best rate at every batch; from 16 on the best rates lie between 3 and 6." in text


@pytest.mark.parametrize("linear, constant, said", [
    ([0.9, 0.95], [0.5, 0.6], "every seed ends higher with the linear rule at batch 16"),
    ([0.1, 0.2], [0.5, 0.6], "every seed ends higher with the constant rate at batch 16"),
    ([0.1, 0.9], [0.5, 0.6], "do not tell the rules apart at 16")])
def test_what_is_said_after_equal_epochs(linear, constant, said):
    rows = [{"rule": rule, "batch": batch, "accuracy": value} for batch in (8, 16)
            for rule, values in (("linear rule", linear), ("constant rate", constant)) for value in values]
    text = course.on_compared(pd.DataFrame(rows))
    assert said in text and text.count("16") == 1 and "8" not in text


def test_times_share_the_batch_among_the_ranks():
    top = pd.DataFrame({"steps": [100, 30, 20, 18]}, index=[8, 16, 32, 64])
    seconds = pd.Series({8: 0.001, 16: 0.001, 32: 0.002, 64: 0.004})
    assert course.times(top, seconds, 1).to_dict() == pytest.approx({8: 0.1, 16: 0.03, 32: 0.04, 64: 0.072})
    assert course.times(top, seconds, 4).to_dict() == pytest.approx({32: 0.02, 64: 0.018})
    text = course.on_times(top, seconds)
    assert "batch 16 on 1 rank (0.03 s)" in text and "batch 64 on 4 ranks (0.02 s)" in text
    assert "batch 64 has the fewest steps and takes 2.4 times the least time" in text
    assert "batch 16 has the most images a second and takes the least time" in text
    faster = course.on_times(top, pd.Series({8: 0.001, 16: 0.001, 32: 0.002, 64: 0.003}))
    assert "batch 64 has the most images a second and takes 1.8 times the least time" in faster


@pytest.mark.parametrize("without, with_it, said", [
    ([0.5, 0.6], [0.9, 0.9], "every seed ends higher with"), ([0.9, 0.9], [0.5, 0.6], "every seed ends lower with"),
    ([0.2, 0.97], [0.94, 0.96], "the seeds do not tell whether")])
def test_what_is_said_of_warm_up(without, with_it, said):
    assert f"At rate 0.2 {said} warm-up" in course.on_warm_up({(0.2, 0): without, (0.2, 4): with_it})


def test_what_is_said_of_drawn_noise():
    exact = [course.noise(size, 10.0) for size in (1, 2, 4)]
    text = course.on_drawn([1, 2, 4], [1.3 * exact[0], *exact[1:]], 10)
    assert "30 % off the formula at most, 0 % in the median" in text


def test_a_rule_s_rate():
    assert course.rule_rate("linear rule", 8, 0.1, 32) == 0.4 and course.rule_rate("constant rate", 8, 0.1, 32) == 0.1
