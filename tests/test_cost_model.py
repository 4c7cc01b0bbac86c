"""The cost model: its formulae, its constants, and the published rows that it is held against."""

import csv
import hashlib
import json
import math
import statistics
from dataclasses import asdict, replace

import pytest
from conftest import ROOT, load_module
from tolerances import ARITHMETIC, NETWORK_LARGEST, NETWORK_MEDIAN, NODE_LARGEST, NODE_MIXED_LARGEST, THREE_DIGITS

model = load_module(ROOT / "03_ddp" / "cost_model.py")
CENTRAL, Cluster = model.CENTRAL, model.Cluster
ROWS = {  # nobody drops a row that does not fit; to E belongs one that lacks an input, and no other
    "A": ["Goyal 256 P100", "Horovod docs 512, Inception V3", "Horovod docs 512, ResNet-101",
          "Horovod docs 512, VGG-16", "Horovod paper 128, Inception V3", "Horovod paper 128, ResNet-101",
          "Horovod README 128, VGG-16"],
    "B": ["PyTorch 8 A100 TF32", "MXNet 8 A100 TF32", "MXNet 8 A100 AMP", "MXNet 8 V100 FP32", "MXNet 8 V100 AMP",
          "MXNet DGX-2, 8 V100 FP32", "MXNet DGX-2, 16 V100 FP32", "PyTorch 8 A100 AMP", "PyTorch 8 V100 AMP",
          "MXNet DGX-2, 8 V100 AMP", "MXNet DGX-2, 16 V100 AMP"],
    "E": ["Polaris 8 A100, sockets", "Yamazaki 2,048 V100", "Akiba 1,024 P100", "Mikami 3,456 V100"]}


def rows(group):
    """The rows of a group as predict() takes them."""
    found = []
    with open(ROOT / "assets" / "records" / "published.csv") as file:
        for row in csv.DictReader(file):
            words = {"group", "name", "network", "framework", "buckets", "algorithm", "source", "note"}
            found.append({name: text if name in words else text == "True" if name == "measured" else float(text)
                          for name, text in row.items()})
            for name in ("nodes", "gpus", "base_gpus"):
                found[-1][name] = int(found[-1][name])
    return [row for row in found if row["group"] == group]


def errors(group):
    return [abs(model.predict(row) / row["images_per_second"] - 1) for row in rows(group)]


def test_constants_and_inputs_are_those_that_were_fixed_first():
    """Whoever changes one, to fit a row or to widen the band, has to change it here, too."""
    assert {name: round(value, 9) for name, value in asdict(CENTRAL).items()} == {
        "backward": 0.666666667, "usable": 0.9, "jitter": 0.019929244, "hop": 3e-6, "level": 2e-5}
    bands = {name: (getattr(model.PESSIMIST, name), getattr(model.OPTIMIST, name)) for name in asdict(CENTRAL)}
    assert bands == {"backward": (0.5, 0.75), "usable": (0.8, 1.0), "hop": (6e-6, 1.5e-6), "level": (4e-5, 1e-5),
                     "jitter": (2 * CENTRAL.jitter, CENTRAL.jitter / 2)}
    inputs = [{name: value for name, value in row.items() if name not in ("source", "note")}
              for group in ROWS for row in rows(group)]
    assert hashlib.sha256(json.dumps([inputs, model.BUCKETS]).encode()).hexdigest()[:16] == "3a507e2357204589"


@pytest.mark.parametrize("group", ROWS)
def test_no_row_is_dropped_and_each_has_its_source(group):
    found = rows(group)
    assert [row["name"] for row in found] == ROWS[group]
    assert all(row["source"] and (row["note"] or group == "B") for row in found)


def test_rows_over_a_network_and_in_a_node():
    assert statistics.median(errors("A")) <= NETWORK_MEDIAN and max(errors("A")) <= NETWORK_LARGEST
    in_full = [error for row, error in zip(rows("B"), errors("B")) if "AMP" not in row["name"]]
    assert max(in_full) <= NODE_LARGEST and max(errors("B")) <= NODE_MIXED_LARGEST


def test_the_jitter_is_fitted_to_its_row():
    """8 V100 in FP32: 2,855 images/s for 367 of one. The model without communication gives that back."""
    step = model.step_seconds(256 / 367, 1, Cluster(1, 8, 1, 1e30, "ring"))
    assert 8 * 256 / step == pytest.approx(2855, rel=THREE_DIGITS)


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
    assert model.all_reduce_seconds(1e9, replace(flat, measured=True), exact) == pytest.approx(2 * 3 / 4)
    assert model.all_reduce_seconds(0, Cluster(8, 4, 1e9, 1e9)) == pytest.approx(20e-6 * 4)  # 1 + log2(8) levels
    assert model.all_reduce_seconds(1e9, Cluster(1, 1, 1, 1)) == 0


@pytest.mark.parametrize(("library", "first"), [("DDP", 2**20), ("Horovod", 64 * 2**20)])
def test_buckets_hold_all_gradients(library, first):
    sizes = model.bucket_sizes(200e6, library)
    assert sum(sizes) == pytest.approx(200e6) and sizes[0] == first
    assert model.bucket_sizes(1000, library) == [1000]


def test_a_step_hides_what_it_can():
    cluster = Cluster(2, 1, 1e9, 1e9)
    compute, late = 0.3, 1 + CENTRAL.jitter * model.slowest(2)
    hidden, shown = (model.step_seconds(compute, 1e8, cluster, overlap=overlap) for overlap in (True, False))
    buckets = model.bucket_sizes(1e8)
    assert shown == pytest.approx(compute * late + sum(model.all_reduce_seconds(size, cluster) for size in buckets))
    last = model.all_reduce_seconds(buckets[-1], cluster)  # which nothing hides
    assert hidden == pytest.approx(compute * late + last)
    assert model.step_seconds(compute, 1e8, Cluster(1, 1, 1, 1)) == pytest.approx(compute)
    slow = replace(cluster, node_link=1e6)  # the links decide: the first bucket starts when backward has filled it
    start = compute * late * (1 - CENTRAL.backward * (1 - buckets[0] / 1e8))
    assert model.step_seconds(compute, 1e8, slow) == pytest.approx(
        start + sum(model.all_reduce_seconds(size, slow) for size in buckets))


def test_how_many_nodes():
    """Links that cost nothing, no jitter and a large batch: every doubling halves the time."""
    free = Cluster(1, 4, 1e30, 1e30)
    ideal = replace(CENTRAL, jitter=0.0, hop=0.0, level=0.0)
    found = model.plan(1e6, 1000, 0, 32, 10**9, 1e8, free, [1, 2, 4, 8], constants=ideal)
    assert [row["images_per_second"] for row in found] == pytest.approx([4000, 8000, 16000, 32000])
    assert found[0]["hours"] == pytest.approx(1e6 / 4000 / 3600) and model.worth_asking_for(found) == 8
    few = model.plan(1e6, 1000, 0, 32, 64, 1e8, free, [1, 4, 16, 64], constants=ideal)
    assert [(row["nodes"], row["batch"]) for row in few] == [(1, 16), (4, 4), (16, 1)]  # 64 nodes: no image each
    slow = model.plan(1e6, 1000, 0, 32, 10**9, 1e8, Cluster(1, 4, 1e6, 1e11), [1, 2, 4])
    assert model.worth_asking_for(slow) == 1
