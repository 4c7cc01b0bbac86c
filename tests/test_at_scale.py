"""03_ddp/at_scale.py: its formulae beside others, simulated failures, and what is published beside it."""

from dataclasses import replace

import numpy as np
import pytest
from tolerances import SCALE_LARGEST, SIMULATED

from tools import style
from tools.pages import at_scale as page

scale, model = page.at_scale, page.cost_model
CENTRAL, H100, MODEL_7B, Link = model.CENTRAL, scale.H100, scale.MODEL_7B, scale.Link
pytestmark = pytest.mark.check


def test_an_all_reduce_of_two_levels_is_a_ring_in_the_node_and_halving_between():
    """32 GPUs, 800 bytes: in a node 2 x 7 messages and 7/8 of the bytes twice; between 4 nodes 2 x 2, and 3/4 twice."""
    fabric = scale.Fabric(8, Link(0.5, 0.25), Link(8.0, 2.0))
    expected = 14 * 0.5 + 1400 * 0.25 + 4 * 8 + 1200 * 2
    assert scale.all_reduce_seconds(800, 32, fabric) == pytest.approx(expected)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (16, 1)])
def test_on_one_level_it_is_the_cost_model_s_ring(nodes, gpus):
    cluster = model.Cluster(nodes, gpus, 5e9, 80e9, "ring")
    rates = {"inside": 80e9, "between": 5e9}
    fabric = scale.Fabric(gpus, *(Link(CENTRAL.hop, 1 / (rate * CENTRAL.usable)) for rate in rates.values()), "ring")
    assert scale.all_reduce_seconds(1e8, cluster.ranks, fabric) == pytest.approx(model.all_reduce_seconds(1e8, cluster))
    job = replace(MODEL_7B, gradient_bytes=1e8)
    _, step = scale.step_parts(0.3, cluster.ranks, job, fabric)
    assert step == pytest.approx(model.step_seconds(0.3, 1e8, cluster))


def test_alpha_and_beta_of_two_nodes_are_found_again():
    """Small messages that pass at once, as a token bucket lets them, do not make the link faster."""
    true = Link(200e-6, 8e-9)  # 1 Gbit/s
    fabric = scale.Fabric(1, true, true, "ring")
    sizes = [4**power for power in range(1, 14)]
    seconds = [scale.all_reduce_seconds(size, 2, fabric) if size > 2 * page.BURST else 1e-9 for size in sizes]
    link, _ = page.lab([{"nodes": 2, "bytes": size, "seconds": each} for size, each in zip(sizes, seconds)], page.BURST)
    assert (link.alpha, link.beta) == pytest.approx((true.alpha, true.beta))


def test_daly_s_formula_gives_the_intervals_that_he_prints():
    """Figures 3 to 5: checkpoints of 5 minutes, a failure every 24 h, 6 h, 15 min: 117, 57 and 9.1 minutes."""
    assert [round(scale.daly(5, mtbf), digits) for mtbf, digits in ((1440, 0), (360, 0), (15, 1))] == [117, 57, 9.1]


def simulated(interval, checkpoint, restart, mtbf, stretches=100_000):
    """Shares of time in steps that count, in checkpoints, in restarts, lost: each failure drawn, none by a formula."""
    chance = np.random.default_rng(2)
    need = np.full(stretches, interval + checkpoint)  # what has to go well: the first time no restart
    restarts, whole = 0.0, 0.0
    while len(need):
        fails = chance.exponential(mtbf, len(need))
        whole += np.minimum(fails, need).sum()
        restarts += np.minimum(fails, need - interval - checkpoint).sum()
        need = np.full((fails < need).sum(), restart + interval + checkpoint)
    shares = {"goodput": stretches * interval / whole, "checkpoints": stretches * checkpoint / whole,
              "restarts": restarts / whole}
    return shares | {"lost work": 1 - sum(shares.values())}


@pytest.mark.parametrize(("checkpoint", "restart", "mtbf"), [(148.8, 600, 50677 * 3.6e3 / 1e4), (300, 600, 900)])
def test_time_is_lost_as_the_formula_says_and_daly_s_interval_is_the_best(checkpoint, restart, mtbf):
    best = scale.daly(checkpoint, mtbf)
    for interval in (best / 2, best, 2 * best):
        shares = scale.time_shares(interval, checkpoint, restart, mtbf)
        assert shares == pytest.approx(simulated(interval, checkpoint, restart, mtbf), abs=SIMULATED)
    found = [simulated(interval, checkpoint, restart, mtbf)["goodput"] for interval in best * np.geomspace(0.3, 3, 13)]
    assert found[6] > max(found) - SIMULATED  # Daly's own
    assert found[6] > max(found[0], found[-1]) + SIMULATED


def test_a_row_adds_up():
    row = scale.predict(10000, MODEL_7B, H100)
    assert sum(row[name] for name in style.TIME) == pytest.approx(1)  # as the figure stacks them


def test_the_published_rows_up_to_3584_gpus():
    table = page.mlperf()
    errors = table.predicted / table.published - 1
    assert len(errors) == 5 and errors.abs().max() <= SCALE_LARGEST
