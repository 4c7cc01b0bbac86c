"""03_ddp/at_scale.py: its formulae, simulated or counted; its assumptions; and what is published beside it."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT, load_module
from tolerances import ARITHMETIC, LAB, SAMPLE, SCALE_LARGEST, SIMULATED, THREE_DIGITS

from tools.pages import at_scale as page
from tools.pages import style

scale = load_module(ROOT / "03_ddp" / "at_scale.py")
model = page.cost_model
CENTRAL, H100, MODEL_7B, Link = model.CENTRAL, scale.H100, scale.MODEL_7B, scale.Link


# --- communication ---

def two_levels(nodes, gpus, length):
    """Do it: an all-reduce of random vectors in two levels, between nodes by halving and doubling.

    Returns the messages that a GPU sends in the node and between nodes, and the numbers that a GPU sends in the node
    and a node to others. Every GPU has to end with the sum.
    """
    held = np.random.default_rng(0).integers(100, size=(nodes, gpus, length))
    expected = held.sum(axis=(0, 1))
    own = length // gpus  # of a GPU's part
    messages, sent = {"inside": 0, "between": 0}, {"inside": 0, "between": 0}
    for step in range(gpus - 1):  # the ring in each node: reduce and scatter
        messages["inside"] += 1
        sent["inside"] += own
        before = held.copy()
        for gpu in range(gpus):
            part = slice((gpu - step) % gpus * own, ((gpu - step) % gpus + 1) * own)
            held[:, (gpu + 1) % gpus, part] += before[:, gpu, part]
    parts = [slice((gpu + 1) % gpus * own, ((gpu + 1) % gpus + 1) * own) for gpu in range(gpus)]
    begin, size, distances = np.zeros(nodes, int), own, []
    while size > own // nodes:  # halving: each keeps the half that the partner does not
        size //= 2
        distances.append(len(distances))
        messages["between"] += 1
        sent["between"] += gpus * size
        before = held.copy()
        for node in range(nodes):
            begin[node] += size * (node >> distances[-1] & 1)
            for gpu, part in enumerate(parts):
                mine = slice(part.start + begin[node], part.start + begin[node] + size)
                held[node, gpu, mine] += before[node ^ 1 << distances[-1], gpu, mine]
    for bit in reversed(distances):  # doubling
        messages["between"] += 1
        sent["between"] += gpus * size
        before, first = held.copy(), begin.copy()
        for node in range(nodes):
            other = node ^ 1 << bit
            for gpu, part in enumerate(parts):
                theirs = slice(part.start + first[other], part.start + first[other] + size)
                held[node, gpu, theirs] = before[other, gpu, theirs]
            begin[node] = min(first[node], first[other])
        size *= 2
    for step in range(gpus - 1):  # the ring in each node: gather
        messages["inside"] += 1
        sent["inside"] += own
        before = held.copy()
        for gpu in range(gpus):
            part = slice((gpu + 1 - step) % gpus * own, ((gpu + 1 - step) % gpus + 1) * own)
            held[:, (gpu + 1) % gpus, part] = before[:, gpu, part]
    assert (held == expected).all()
    return messages, sent


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 4), (4, 1), (2, 2), (8, 3), (4, 8)])
def test_an_all_reduce_in_two_levels_sends_what_the_formula_says(nodes, gpus):
    length = 96 * nodes
    messages, sent = two_levels(nodes, gpus, length)
    inside, between = Link(0.5, 0.25), Link(8.0, 2.0)
    fabric = scale.Fabric(gpus, inside, between)
    assert scale.all_reduce_seconds(length, nodes * gpus, fabric) == pytest.approx(
        sum(link.alpha * messages[name] + link.beta * sent[name]
            for name, link in (("inside", inside), ("between", between))))


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (16, 1)])
def test_on_one_level_it_is_the_cost_model_s_ring(nodes, gpus):
    cluster = model.Cluster(nodes, gpus, 5e9, 80e9, "ring")
    rates = {"inside": 80e9, "between": 5e9}
    fabric = scale.Fabric(gpus, *(Link(CENTRAL.hop, 1 / (rate * CENTRAL.usable)) for rate in rates.values()), "ring")
    for size in (0, 1e3, 1e8):
        expected = model.all_reduce_seconds(size, cluster)
        assert scale.all_reduce_seconds(size, cluster.ranks, fabric) == pytest.approx(expected)
    _, step = scale.step_parts(0.3, cluster.ranks, replace(MODEL_7B, gradient_bytes=1e8), fabric)
    assert step == pytest.approx(model.step_seconds(0.3, 1e8, cluster))


def test_a_number_of_gpus_that_does_not_fill_nodes_is_refused(monkeypatch, capsys):
    for gpus in (0, 12):
        with pytest.raises(ValueError, match="do not fill nodes of 8"):
            scale.all_reduce_seconds(1e6, gpus, H100)
    with pytest.raises(ValueError, match="none has anything to compute"):
        scale.predict(2**27, MODEL_7B, H100)
    monkeypatch.setattr("sys.argv", ["at_scale.py", "12"])
    with pytest.raises(SystemExit, match="2"):
        scale.main()
    assert capsys.readouterr().err.splitlines()[-1] == "at_scale.py: error: 12 GPUs do not fill nodes of 8"


# --- the lab ---

def all_reduces(link, nodes=(2, 4), noise=0.0):
    """Made-up measurements of a ring of nodes on this link, 4 bytes to 64 MB; relative noise."""
    chance = np.random.default_rng(1)
    fabric = scale.Fabric(1, link, link, "ring")
    return [{"nodes": count, "bytes": 4**power,
             "seconds": scale.all_reduce_seconds(4**power, count, fabric) * (1 + noise * chance.standard_normal())}
            for count in nodes for power in range(1, 14) for _ in range(3)]


def test_alpha_and_beta_are_found_again():
    true = Link(200e-6, 8e-9)  # 1 Gbit/s
    found = scale.fit_link(all_reduces(true))
    assert (found.alpha, found.beta) == pytest.approx((true.alpha, true.beta))
    tree = [{"nodes": 4, "bytes": size, "seconds": 4 * true.alpha + 1.5 * size * true.beta} for size in (8, 10**8)]
    assert scale.fit_link(tree, "tree").alpha == pytest.approx(true.alpha)


def test_small_messages_count_as_much_as_large_ones():
    """With noise in proportion, alpha is found; by plain least squares it drowns in the noise of the largest sizes."""
    true = Link(200e-6, 8e-9)
    rows = all_reduces(true, noise=0.05)
    found = scale.fit_link(rows)
    assert (found.alpha, found.beta) == pytest.approx((true.alpha, true.beta), rel=SAMPLE)
    table = [[*scale.costs(row["nodes"], "ring"), row["bytes"], row["seconds"]] for row in rows]
    messages, factor, size, seconds = np.array(table).T
    plain = np.linalg.lstsq(np.stack([messages, factor * size], axis=1), seconds, rcond=None)[0]
    assert abs(plain[0] / true.alpha - 1) > 10 * SAMPLE


def test_rows_that_give_no_link_are_refused():
    with pytest.raises(ValueError, match="two sizes or more"):
        scale.fit_link([{"nodes": 2, "bytes": 8, "seconds": 1e-4}] * 2)
    with pytest.raises(ValueError, match="two sizes or more"):
        scale.fit_link(all_reduces(Link(1e-4, 1e-9), nodes=(1,)))
    with pytest.raises(ValueError, match="no line through these"):
        scale.fit_link([{"nodes": 2, "bytes": size, "seconds": 1 / size} for size in (1e3, 1e6)])


def test_what_passes_at_once_does_not_make_a_link_faster():
    """Small messages of a token bucket take no time: with them in the fit, large ones would be far too fast."""
    true = Link(0.0, 8e-9)
    rows = [row | ({"seconds": 1e-4} if row["bytes"] <= 2 * page.BURST else {}) for row in all_reduces(true)]
    link, _ = page.lab(rows, page.BURST)
    assert (link.alpha, link.beta) == pytest.approx((0, true.beta))
    assert page.lab(rows)[0].beta < true.beta / 1.1
    slower = [{"nodes": 2, "bytes": 2**power, "seconds": 2**power / 1e9 - 1e-4} for power in range(20, 25)]
    assert scale.fit_link(slower).alpha == 0  # never below


def test_what_two_nodes_take_predicts_four():
    """Four nodes that take a quarter longer change no link; of repeats the median counts; one node is let be."""
    true = Link(200e-6, 8e-9)
    slower = [row | {"seconds": row["seconds"] * (1.25 if row["nodes"] == 4 else 1)} for row in all_reduces(true)]
    once = [{"nodes": 2, "bytes": 4, "seconds": 9.0}, {"nodes": 1, "bytes": 8, "seconds": 1e-6}]
    link, errors = page.lab(slower + once)
    assert (link.alpha, link.beta) == pytest.approx((true.alpha, true.beta))
    assert len(errors) == 26 and errors == pytest.approx({key: 0 if key[0] == 2 else -0.2 for key in errors})
    assert scale.all_reduce_seconds(1e6, 1, scale.Fabric(1, link, link, "ring")) == 0


def test_the_lab_s_measurements_are_met():
    """At four nodes, from a bucket of DDP on. AT_SCALE.md, Beside the lab, has the place for their table."""
    assert f"burst={page.BURST // 1024}kb" in (ROOT / "submit" / "lab.sh").read_text()
    rows = [json.loads(line) for line in (ROOT / "assets" / "records" / "lab_allreduce.jsonl").open()]
    found = [error for link in {row["link"] for row in rows} - {"none"}
             for (nodes, size), error in page.lab((row for row in rows if row["link"] == link), page.BURST)[1].items()
             if nodes == 4 and size >= model.MB]
    assert found and max(map(abs, found)) <= LAB


# --- failures ---

def test_daly_s_formula_gives_the_intervals_that_he_prints():
    """Figures 3 to 5: checkpoints of 5 minutes, a failure every 24 h, 6 h, 15 min: 117, 57 and 9.1 minutes."""
    assert [round(scale.daly(5, mtbf), digits) for mtbf, digits in ((1440, 0), (360, 0), (15, 1))] == [117, 57, 9.1]
    assert scale.young(5, 1440) == pytest.approx(120)
    assert scale.daly(30, 15) == scale.daly(31, 15) == 15  # rather work than save


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


@pytest.mark.parametrize(("checkpoint", "restart", "mtbf"), [(148.8, 600, 50677 * 3.6e3 / 1e4), (6.3, 600, 3000),
                                                             (300, 600, 900)])
def test_time_is_lost_as_the_formula_says_and_daly_s_interval_is_the_best(checkpoint, restart, mtbf):
    best = scale.daly(checkpoint, mtbf)
    for interval in (best / 2, best, 2 * best):
        shares = scale.time_shares(interval, checkpoint, restart, mtbf)
        assert sum(shares.values()) == pytest.approx(1)
        assert shares == pytest.approx(simulated(interval, checkpoint, restart, mtbf), abs=SIMULATED)
    around = best * np.geomspace(0.3, 3, 13)
    found = [simulated(interval, checkpoint, restart, mtbf)["goodput"] for interval in around]
    assert around[np.argmax(found)] == pytest.approx(best, rel=0.5)
    assert simulated(best, checkpoint, restart, mtbf)["goodput"] > max(found) - SIMULATED
    assert simulated(best, checkpoint, restart, mtbf)["goodput"] > max(found[0], found[-1]) + SIMULATED


def test_young_and_daly_are_near_the_exact_best():
    """Where a checkpoint is short beside the time between failures; there the loss is sqrt(2 d / M) + R / M."""
    checkpoint, restart, mtbf = 10.0, 100.0, 1e6
    intervals = np.geomspace(500, 50000, 20001)
    goodput = [scale.time_shares(interval, checkpoint, restart, mtbf)["goodput"] for interval in intervals]
    exact = intervals[np.argmax(goodput)]
    assert scale.daly(checkpoint, mtbf) == pytest.approx(exact, rel=THREE_DIGITS)
    assert scale.young(checkpoint, mtbf) == pytest.approx(exact, rel=SIMULATED)
    assert 1 - max(goodput) == pytest.approx(math.sqrt(2 * checkpoint / mtbf) + restart / mtbf, rel=SIMULATED)


# --- all of it, and what the page says ---

def test_a_row_adds_up_and_gets_worse_with_the_number_of_gpus():
    rows = [scale.predict(gpus, MODEL_7B, H100) for gpus in (1, 8, 64, 512, 1024, 2048, 4096, 10000)]
    for row in rows:
        assert sum(row[name] for name in style.TIME) == pytest.approx(1)  # as the figure stacks them
        assert row["failures"] == pytest.approx(sum(row[name] for name in ("checkpoints", "lost work", "restarts")))
        assert row["useful"] == pytest.approx(row["efficiency"] * row["goodput"])
        assert row["mtbf"] * row["gpus"] == pytest.approx(MODEL_7B.gpu_mtbf)
        assert row["batch"] * row["gpus"] <= MODEL_7B.largest_batch
    for name, sign in (("useful", -1), ("goodput", -1), ("mtbf", -1), ("interval", -1), ("failures", 1),
                       ("all_reduce", 1)):
        assert all(sign * one[name] < sign * other[name] for one, other in zip(rows, rows[1:])), name
    assert rows[0]["all_reduce"] == rows[0]["stragglers"] == 0


def test_what_the_page_says_of_its_table():
    rows = {gpus: scale.predict(gpus, MODEL_7B, H100) for gpus in scale.COUNTS}
    costs = {name: rows[10000][name] for name in ("stragglers", "communication", "failures")}
    assert max(costs, key=costs.get) == "communication" and rows[4096]["communication"] < rows[4096]["stragglers"] / 10
    assert rows[4096]["failures"] / rows[1024]["failures"] == pytest.approx(2, rel=0.1)
    unlimited = scale.predict(10000, replace(MODEL_7B, largest_batch=10**9), H100)
    assert unlimited["communication"] < rows[4096]["stragglers"] / 10  # enough to compute: all is hidden
    assert scale.predict(10000, replace(MODEL_7B, library="Horovod"), H100)["step"] < rows[10000]["step"]  # buckets
    mtbf = rows[10000]["mtbf"]
    one, twice = (scale.time_shares(interval, MODEL_7B.checkpoint, MODEL_7B.restart, mtbf)["goodput"]
                  for interval in (rows[10000]["interval"], 2 * rows[10000]["interval"]))
    llama, research = scale.GIVEN["time between failures of a GPU"], page.RSC
    assert one - twice < page.goodput(10000, llama, 6.3) - one < one - page.goodput(10000, research, 148.8)
    assert llama / 1024 > 7.9 and page.goodput(16384, llama, 6.3) > 0.9 > page.goodput(16384, llama, 148.8)


def test_the_published_rows_up_to_3584_gpus():
    table = page.mlperf()
    errors = table.predicted / table.published - 1
    assert list(table.index) == [8, 64, 512, 768, 3584]
    assert errors.loc[[8, 64]].abs().max() < ARITHMETIC  # fitted
    assert errors.loc[[512, 768, 3584]].abs().max() <= SCALE_LARGEST and (errors.loc[512:] < 0).all()
    assert errors.abs().idxmax() == 3584
    ring = table["flat ring"] / table.published - 1
    assert ring.loc[512:].abs().min() >= 2 * SCALE_LARGEST and ring[3584] < -0.5
    assert model.bucket_sizes(page.GRADIENTS, "Horovod") == [page.GRADIENTS]  # one buffer, as mlperf() has it


def test_the_assumptions_are_what_is_computed_with_and_each_has_its_source():
    given = scale.GIVEN
    assert all(one.source for one in scale.ASSUMPTIONS) and len(given) == len(scale.ASSUMPTIONS)
    assert given["scatter of a GPU's step"] == round(100 * CENTRAL.jitter, 2)
    assert given["backward's part of computing"] == round(100 * CENTRAL.backward)
    assert given["usable share of these rates"] == pytest.approx(CENTRAL.usable)
    assert given["GPUs of a node"] == pytest.approx(H100.gpus)
    assert 1e6 * H100.inside.alpha == pytest.approx(given["a message in the node"])
    assert 1e6 * H100.between.alpha == pytest.approx(given["a message between nodes"])
    assert [1 / link.beta / CENTRAL.usable / 1e9 for link in (H100.inside, H100.between)] == pytest.approx([450, 400])
    assert MODEL_7B.gpu_mtbf == pytest.approx(54 * 24 * 3600 * 16384 / 419, rel=THREE_DIGITS)
    assert MODEL_7B.batch / MODEL_7B.rate == pytest.approx(6 * 7e9 * 8192 / 400e12)
    assert (MODEL_7B.gradient_bytes, MODEL_7B.checkpoint, MODEL_7B.restart) == (14e9, 148.8, 600)


def test_the_figure_says_what_is_computed():
    figure = page.draw()
    row = scale.predict(10000, MODEL_7B, H100)
    assert f"of 10,000 GPUs {row['useful']:.0%} is useful" in figure.legends[0].get_title().get_text()
    first = page.outlasting()
    before, at = (scale.predict(gpus, MODEL_7B, H100)["communication"] for gpus in (first - 800, first + 800))
    assert before < row["stragglers"] / 10 < at
