"""What scaling.ipynb draws and says: its numbers against other computations, its sentences against made-up ones."""

import pandas as pd
import pytest
from tolerances import ARITHMETIC, COUNT, PERCENT

from tools.notebooks import scaling
from tools.notebooks.cost_model import LARGEST, cost_model, mlperf_runs, predict, step_lines

MLPERF = mlperf_runs()


def records(study, speeds, batch):
    """Made-up records, a repeat each: {ranks: images/s}."""
    return pd.DataFrame([{
        "study": study, "flags": "", "site": "here", "processor": "x", "chapter": "03_ddp", "ranks": ranks,
        "batch": batch, "images_per_second": speed, "device": "cpu", "cpus": 2, "nodes": 1, "steps": 35}
        for ranks, speed in speeds.items()])


def test_the_sentence_on_what_was_measured_follows_its_numbers():
    said = scaling.on_measured(records("weak", {1: 100, 2: 180}, 64), records("strong", {1: 120, 2: 90}, 128))
    assert "90% to 90%" in said and "38% to 38% in strong" in said
    assert "the same, 64 images a rank" in said and "by up to 50%" in said
    other = scaling.on_measured(records("weak", {1: 100, 2: 180}, 64), records("strong", {1: 120, 2: 90}, 64))
    assert "the same" not in other


def step(backward, sent):
    """A made-up step of two ranks: when each backward and each all-reduce ends; 100 long."""
    return {rank: [("forward", 0, 10), ("backward", 10, end), ("all-reduce", 20, sent), ("optimizer", 90, 100)]
            for rank, end in enumerate(backward)}


def test_what_is_exposed_begins_when_all_have_computed():
    assert scaling.exposed(step((60, 70), 85)) == pytest.approx((0.15, 0.10))
    assert scaling.exposed(step((60, 60), 50)) == (0, 0)
    assert scaling.length(step((60, 70), 85)) == 100


def test_the_sentence_on_the_profiled_step_follows_its_numbers():
    said = scaling.on_profiled([step((60, 70), 85)])
    assert "77% of the all-reduces' time" in said  # 50 of 65, of either rank
    assert "15.0% of a step" in said and "backward: 10.0%" in said
    assert "100% of the all-reduces' time" in scaling.on_profiled([step((60, 60), 50)])


def test_recorded_steps_are_by_length_and_begin_at_zero():
    for chapter in ("03_ddp", "02_horovod/pytorch"):
        steps = scaling.profiled(chapter)
        assert [scaling.length(found) for found in steps] == sorted(map(scaling.length, steps))
        assert all(min(start for spans in found.values() for _, start, _ in spans) == 0 for found in steps)


def test_published_efficiencies():
    found = scaling.efficiencies().set_index("name")
    assert "E" not in set(found.group)
    assert found.efficiency["Horovod docs 512, VGG-16"] == pytest.approx(0.68, abs=PERCENT)
    assert found.efficiency["Goyal 256 P100"] == pytest.approx(0.90, abs=PERCENT)
    assert found.efficiency[LARGEST] == pytest.approx(9836215 / 55802 / 448, rel=ARITHMETIC)


def test_the_sentence_on_published_efficiencies_follows_its_numbers():
    found = pd.DataFrame({"group": ["A", "A", "MLPerf", "MLPerf"], "network": ["small", "large", "x", "x"],
                          "gpus": [16, 32, 8, 4096], "batch": [1, 1, 300, 7], "gradient_bytes": [1e6, 9e6, None, None],
                          "efficiency": [0.9, 0.4, 1.0, 0.25]})
    said = scaling.on_efficiencies(found)
    assert "16 to 32 GPUs over a network 40% to 90%" in said and "least by large on 32" in said
    assert "the most of these networks" in said and "25% on 4,096, where each takes 7 images" in said
    said = scaling.on_efficiencies(found.assign(efficiency=[0.3, 0.4, 1.0, 0.25]))
    assert "least by small on 16" in said and "the most of" not in said


def test_the_step_of_the_benchmark_is_the_published_row_s():
    row = scaling.published_runs().set_index("name").loc["Horovod docs 512, VGG-16"]
    spans, kept = scaling.published_step("VGG-16", 25, overlap=True)
    assert kept == pytest.approx(predict(row.to_dict()) / scaling.perfect(row))
    assert kept == pytest.approx((64 / 154) / spans[-1][2])


def test_overlap_saves_and_faster_links_help():
    found = scaling.overlaps("Inception V3")
    assert (found["with"] > found["without"]).all()
    assert found["with"].is_monotonic_increasing and found.exposed.is_monotonic_decreasing


def test_the_sentence_on_overlap_follows_its_numbers():
    found = pd.DataFrame({"with": [0.5, 0.8], "without": [0.4, 0.7], "exposed": [0.3, 0.04], "published": 0.6},
                         index=[10, 100])
    said = scaling.on_overlap(found, 10)
    assert "50% with overlap, 40% without; published are 60%" in said and said.endswith(" 4.0% at 100 Gbit/s.")
    assert scaling.on_overlap(found.assign(exposed=0.2), 10).endswith(" 20.0% at 100 Gbit/s.")


def test_the_factors_of_mlperf_are_a_product():
    found = scaling.factors(MLPERF)
    assert found == pytest.approx({"gpus": 448, "epochs": 35 / 77, "throughput": 9836215 / 55802 / 448,
                                   "rest": 816.1 / 11.0 / (9836215 / 55802) / (35 / 77)})
    assert "448 times the GPUs, 74 times as fast: **16.6% = 0.455 x 0.393 x 0.926**" in scaling.on_factors(MLPERF)


def test_the_sentence_on_the_factors_follows_its_numbers():
    other = MLPERF.copy()
    other.loc[other.system == LARGEST, ["epochs", "seconds_to_train", "b"]] = [70, 20.0, 17]
    said = scaling.on_factors(other)
    assert f"{816.1 / 20:.0f} times as fast" in said and "x 0.393" in said and "= 0.500 x" in said
    assert "takes 70 epochs and not 35" in said and "17 images at a time" in said


def test_a_plan_on_one_node_is_images_over_rate():
    t0, rate = step_lines(MLPERF)["A100-SXM-40GB"]
    node = scaling.planned(25).iloc[0]
    steps = 90 * 1_281_167 / (4 * 256)
    slowest_of_four = 1 + scaling.CENTRAL.jitter * cost_model.slowest(4)
    assert node.hours * 3600 / steps == pytest.approx(
        slowest_of_four * (t0 + 256 / rate), rel=COUNT)  # but for the last bucket, which NVLink carries
    assert node.hours == scaling.planned(1).iloc[0].hours


def made_up_plan(*hours):
    return pd.DataFrame({"nodes": [1, 2, 8, 64], "hours": hours})


def test_the_sentence_on_the_plan_follows_its_numbers():
    fast, slow = made_up_plan(8, 4, 2, 1), made_up_plan(2, 10, 8, 6)
    said = scaling.on_plan({1: slow, 25: fast}, 25)
    assert "64 nodes cost 4.0 times the node hours of 8" in said
    assert "**1 Gbit/s**: 1 node, 2.0 h" in said and "**25 Gbit/s**: 64 nodes, 60 min" in said
    assert "With 1 Gbit/s two nodes (10.0 h) are slower than one (2.0 h)" in said
    assert "With 25 Gbit/s two nodes" not in said
    assert "slower" not in scaling.on_plan({25: fast}, 25)


def test_the_plan_s_rate_beside_a_published_one():
    t0, rate = step_lines(MLPERF)["A100-SXM-40GB"]
    assert f"the plan is {256 / (t0 + 256 / rate) / 2180 - 1:+.0%}" in scaling.optimism()


def test_the_table_has_what_the_figure_has():
    found = scaling.efficiencies()
    lines = scaling.table(found).splitlines()
    assert len(lines) == len(found) + 1
    assert [line.split()[-4:] for line in lines if "docs 512, VGG" in line] == [["512", "64", "553", "68%"]]


@pytest.mark.parametrize(("nodes", "gigabits"), [(256, 1), (1, 200)])
def test_a_figure_s_headline_is_the_plan_s(nodes, gigabits):
    rows = scaling.planned(gigabits)
    hours = rows.set_index("nodes").hours[nodes]
    title = scaling.draw_plan(nodes, gigabits).get_suptitle()
    assert f": {scaling.minutes(hours)}, {nodes * hours:,.1f} node hours." in title
    assert title.endswith(f"Worth asking for: {scaling.worth(rows)}")


def test_a_time_is_in_minutes_or_hours():
    assert [scaling.minutes(hours) for hours in (0.5, 1.99, 2, 14.76)] == ["30 min", "119 min", "2.0 h", "14.8 h"]
