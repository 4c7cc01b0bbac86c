"""What cost_model.ipynb draws and says: its formulae against others, its sentences against made-up numbers."""

import numpy as np
import pandas as pd
import pytest
from tolerances import NETWORK_MEDIAN, NODE_LARGEST

from tools.notebooks import cost_model as shown

PUBLISHED, MLPERF = shown.published_runs(), shown.mlperf_runs()


def test_a_time_line_ends_when_the_step_ends():
    for overlap in (True, False):
        for library, bytes_, link in (("DDP", 102e6, 1e8), ("DDP", 102e6, 1e11), ("Horovod", 553e6, 3e9)):
            cluster = shown.Cluster(8, 4, link, 1e10)
            spans = shown.timeline(0.25, bytes_, cluster, library, overlap)
            step = shown.cost_model.step_seconds(0.25, bytes_, cluster, library, overlap)
            assert max(end for _, _, end in spans) == pytest.approx(step)
            sent = [span for span in spans if span[0] == "all-reduce"]
            assert len(sent) == len(shown.cost_model.bucket_sizes(bytes_, library))
            assert all(before[2] <= after[1] for before, after in zip(sent, sent[1:]))
            assert (sent[0][1] < spans[1][2]) == (overlap and len(sent) > 1)


def test_a_comparison_is_of_the_row_itself():
    row = PUBLISHED[PUBLISHED.name == "Horovod docs 512, VGG-16"]
    found = shown.compare(row).iloc[0]
    assert found.published == pytest.approx(53617 / (154 * 512))
    assert found.error == pytest.approx(shown.predict(row.iloc[0].to_dict()) / 53617 - 1)
    assert found.low < found.predicted < found.high < found["no communication"] * 1.1


def test_rivals_are_what_their_names_say():
    rows = PUBLISHED[PUBLISHED.name.isin(["Horovod docs 512, VGG-16", "Horovod paper 128, ResNet-101"])]
    kept = [53617 / (154 * 512), 11664 / (103.55 * 128)]
    found = shown.rivals(rows)
    assert found.loc["perfect scaling", "largest"] == pytest.approx(max(1 / share - 1 for share in kept))
    assert found.loc["always 90 %", "median"] == pytest.approx(np.mean([abs(0.9 / share - 1) for share in kept]))
    assert (found["median"] <= found.largest).all()


def test_what_the_notebook_tells_of_a_and_of_the_trap_is_so():
    rows = PUBLISHED[PUBLISHED.group == "A"]
    found = shown.rivals(rows)
    assert shown.compare(rows).error.abs().idxmax() == "Horovod README 128, VGG-16"
    assert found["median"].idxmin() == "always 90 %" and found.largest.idxmin() == "no stragglers"
    slower = shown.compare(rows, shown.replace(shown.CENTRAL, usable=0.5)).predicted
    assert set((shown.compare(rows).predicted - slower).nlargest(2).index) == {
        "Horovod docs 512, VGG-16", "Horovod README 128, VGG-16"}
    errors = shown.trap(PUBLISHED, MLPERF)
    assert abs(errors.loc["ring"].iloc[0]) < NODE_LARGEST and errors.loc["ring"].iloc[1] < -0.7


def test_the_systems_held_out_by_mlperf_are_predicted():
    rows = shown.held_out(MLPERF)
    assert len(rows) == len(MLPERF) - len(shown.FITTED) and not rows.system.isin(shown.FITTED).any()
    assert rows.error.abs().median() <= NETWORK_MEDIAN and rows.error.abs().max() <= 0.15


def test_a_line_goes_through_its_two_runs():
    runs = pd.DataFrame({"b": [100, 300], "step": [0.03, 0.07]})
    assert shown.line(runs) == pytest.approx((0.01, 5000))


def made_up(size_of_model, size_of_rival):
    table = pd.DataFrame({"published": [0.9, 0.5], "predicted": [0.9, 0.5 * (1 + size_of_model)], "low": [0.8, 0.1],
                          "high": [0.95, 0.2]}, index=["good", "bad"])
    found = pd.DataFrame({"median": [size_of_model / 2, size_of_rival / 2], "largest": [size_of_model, size_of_rival]},
                         index=["the model", "always 90 %"])
    return table.assign(error=table.predicted / table.published - 1), found


def test_the_sentence_on_a_network_follows_its_numbers():
    best = shown.on_network(*made_up(0.1, 0.4))
    assert "5.0%; no rule has a better one" in best and "the smallest of all" in best and "(bad: 50% published" in best
    assert "1 of 2 published values lie in the band" in best
    beaten = shown.on_network(*made_up(0.4, 0.1))
    assert "only *always 90 %* (5.0%) has a better one" in beaten
    assert "not better than that of *always 90 %* (10.0%)" in beaten


@pytest.mark.parametrize(("silent", "said"), [(0.901, "cannot tell"), (1.5, "test communication, too")])
def test_the_sentence_on_a_node_follows_its_numbers(silent, said):
    table = pd.DataFrame({"published": [0.9, 0.9], "predicted": [0.9, 0.95], "error": [0.02, 0.3],
                          "no communication": [silent, 0.95]}, index=["x FP32", "x AMP"])
    assert said in shown.on_node(table) and "2.0% off" in shown.on_node(table) and "up to 30%" in shown.on_node(table)


def test_the_sentence_on_mlperf_follows_its_numbers():
    slower = MLPERF.astype({"images_per_second": float})
    slower.loc[slower.system == shown.LARGEST, ["step", "images_per_second"]] *= [10, 0.1]
    assert "too low" in shown.on_mlperf(MLPERF) and "too high" in shown.on_mlperf(slower)
    assert f"{shown.held_out(slower).error.abs().max():.1%} at most" in shown.on_mlperf(slower)
    assert "7 of the 12" in shown.on_mlperf(MLPERF) and "the other 5" in shown.on_mlperf(MLPERF)


def test_a_link_gives_back_the_two_sizes_that_fixed_it():
    sizes = [2**12, *shown.ENDS, 2**26]
    measured = pd.DataFrame({"gloo": [1.0, 2e-3, 3e-2, 4.0]}, index=sizes)
    cluster, constants = shown.links(measured)["gloo"]
    for size in shown.ENDS:
        assert shown.cost_model.all_reduce_seconds(size, cluster, constants) == pytest.approx(measured.gloo[size])
    assert list(shown.own_errors(measured).index) == [2**12, 2**26]


def test_the_sentences_on_our_own_records_follow_their_numbers():
    good = pd.DataFrame({"gloo": [0.01, -0.1], "mpi": [0.02, 0.03]}, index=[4096, 16384])
    assert "all are within 10 %; the worst is 10% off (gloo, 16,384 bytes)" in shown.on_own(good)
    assert "3 of 4" in shown.on_own(good.assign(mpi=[0.02, 0.5]))
    slow = pd.DataFrame({"overlap": [-0.2, -0.1], "no overlap": [-0.1, -0.1]}, index=["DDP", "Horovod"])
    assert "too fast" in shown.on_own_steps(slow) and "For Horovod the two" in shown.on_own_steps(slow)
    assert "Without overlap DDP would be hit better" in shown.on_own_steps(slow)
    mixed = pd.DataFrame({"overlap": [-0.2, 0.1], "no overlap": [-0.1, 0.3]}, index=["DDP", "Horovod"])
    assert "too fast" not in shown.on_own_steps(mixed) and "are one" not in shown.on_own_steps(mixed)
    assert "DDP's step is 20.0% off, Horovod's step is 10.0% off" in shown.on_own_steps(mixed)
    assert "hit better" not in shown.on_own_steps(mixed.assign(overlap=0.01))


def test_the_sentence_on_the_trap_follows_its_numbers():
    errors = pd.DataFrame({"first": [0.3, 0.01], "second": [0.2, -0.8]}, index=["tree", "ring"])
    assert "The ring is 1.0% off for one run and 80% for the next: it hits" in shown.on_trap(errors)
    good = errors.assign(second=[0.2, 0.05])
    assert "hits" not in shown.on_trap(good) and "5% for the next" in shown.on_trap(good)


def test_a_prediction_by_hand_is_the_model_s():
    row = PUBLISHED.set_index("name").loc["Horovod docs 512, Inception V3"]
    predicted = shown.predict(row.to_dict()) / shown.perfect(row)
    assert f"efficiency {predicted:.1%}, published 90%" in shown.by_hand(row)
    assert shown.by_hand(row).count("all-reduce of") == 2


def test_a_folded_table_shows_text_as_it_is():
    assert "<pre>a &lt; b</pre>" in shown.folded("x", "a < b").data
    assert "<td>17</td>" in shown.folded("x", pd.DataFrame({"a": [17]})).data
