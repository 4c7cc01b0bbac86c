"""The cost model: its formulae, and the published rows that it is held against."""

import math
from dataclasses import replace

import pytest
from tolerances import ARITHMETIC, NETWORK_LARGEST, NETWORK_MEDIAN, NODE_LARGEST, NODE_MIXED_LARGEST

from tools.notebooks import cost_model as shown

model = shown.cost_model
CENTRAL, Cluster = model.CENTRAL, model.Cluster
pytestmark = pytest.mark.check


def test_published_rows_over_a_network_and_in_a_node():
    published = shown.published_runs()
    over_a_network, in_a_node = (shown.compare(published[published.group == group]).error.abs() for group in "AB")
    assert (len(over_a_network), len(in_a_node)) == (7, 11)  # nobody drops a row that does not fit
    assert over_a_network.median() <= NETWORK_MEDIAN and over_a_network.max() <= NETWORK_LARGEST
    mixed = in_a_node.index.str.contains("AMP")
    assert in_a_node[~mixed].max() <= NODE_LARGEST and in_a_node.max() <= NODE_MIXED_LARGEST


def test_the_slowest_of_n_ranks():
    assert model.slowest(1) == pytest.approx(0, abs=ARITHMETIC)
    assert model.slowest(2) == pytest.approx(1 / math.sqrt(math.pi), rel=ARITHMETIC)  # known exactly
    assert model.slowest(3) == pytest.approx(3 / (2 * math.sqrt(math.pi)), rel=ARITHMETIC)


def test_an_all_reduce_is_bytes_over_the_slower_link_and_latency():
    exact = replace(CENTRAL, usable=1.0, hop=0.0, level=0.0)
    flat = Cluster(4, 1, 1e9, 1e30, "ring")
    assert model.all_reduce_seconds(1e9, flat, exact) == pytest.approx(2 * 3 / 4)
    tree = Cluster(4, 8, 1e9, 1e30)
    assert model.all_reduce_seconds(1e9, tree, exact) == pytest.approx(2 * 3 / 4)  # between 4 nodes, not 32 GPUs
    assert model.all_reduce_seconds(1e9, Cluster(4, 8, 1e30, 2e9), exact) == pytest.approx(2 * 7 / 8 / 2)
    assert model.all_reduce_seconds(1e9, flat) == pytest.approx(2 * 3 / 4 / 0.9 + 6 * 3e-6)
    assert model.all_reduce_seconds(0, Cluster(8, 4, 1e9, 1e9)) == pytest.approx(20e-6 * 4)  # 1 + log2(8) levels


def test_a_step_hides_what_it_can():
    cluster = Cluster(2, 1, 1e9, 1e9)
    compute, late = 0.3, 1 + CENTRAL.jitter * model.slowest(2)
    hidden, shown = (model.step_seconds(compute, 1e8, cluster, overlap=overlap) for overlap in (True, False))
    buckets = model.bucket_sizes(1e8)
    assert sum(buckets) == pytest.approx(1e8) and buckets[:2] == [2**20, 25 * 2**20]
    assert shown == pytest.approx(compute * late + sum(model.all_reduce_seconds(size, cluster) for size in buckets))
    last = model.all_reduce_seconds(buckets[-1], cluster)  # which nothing hides
    assert hidden == pytest.approx(compute * late + last)
    slow = replace(cluster, node_link=1e6)  # the links decide: the first bucket starts when backward has filled it
    start = compute * late * (1 - CENTRAL.backward * (1 - buckets[0] / 1e8))
    assert model.step_seconds(compute, 1e8, slow) == pytest.approx(
        start + sum(model.all_reduce_seconds(size, slow) for size in buckets))


def test_how_many_nodes():
    """Links that cost nothing, no jitter and a large batch: every doubling halves the time."""
    free = Cluster(1, 4, 1e30, 1e30)
    ideal = replace(CENTRAL, jitter=0.0, hop=0.0, level=0.0)
    found = model.plan(1e6, 1000, 0, 32, 10**9, 1e8, free, [1, 2, 4, 8], constants=ideal)
    assert found[0]["hours"] == pytest.approx(1e6 / 4000 / 3600) and model.worth_asking_for(found) == 8
    few = model.plan(1e6, 1000, 0, 32, 64, 1e8, free, [1, 4, 16, 64], constants=ideal)
    assert [(row["nodes"], row["batch"]) for row in few] == [(1, 16), (4, 4), (16, 1)]  # 64 nodes: no image each
    slow = model.plan(1e6, 1000, 0, 32, 10**9, 1e8, Cluster(1, 4, 1e6, 1e11), [1, 2, 4])
    assert model.worth_asking_for(slow) == 1
