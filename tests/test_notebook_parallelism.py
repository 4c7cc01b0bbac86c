"""What model_vs_data_parallelism.ipynb draws and says: formulae against counts by hand, words against other numbers."""

import os
from fractions import Fraction
from itertools import product

import pytest
from conftest import BIN
from matplotlib.patches import Rectangle

from tools.notebooks import parallelism as ways

STAGES, MICRO_BATCHES = (2, 4, 8), (1, 2, 4, 8, 16, 32)
EVENTS = [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]  # two micro-batches under way


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """As the notebook's first cell sets it."""
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")


def record(way, rank=0, **values):
    """A rank's record, as three_ways.py writes it, with made-up numbers."""
    return {"way": way, "rank": rank, "batch_size": 64, "width": 256, "micro_batches": 4, "difference": 0.0,
            "parameters": 100, "activations": 100, "images": 10, "labels": 10, "start": [], "events": [],
            "sent": [[["all-reduce", 1000]]]} | values


def by_hand(way, images, sequence, width, layers, ranks):
    """Bytes of fp64 that a rank sends: the shapes of the tensors, one after the other."""
    shapes, numbers = [64, *[width] * (layers - 1), 10], 0
    if way == "pipeline":
        return 8 * images * sequence * width * (1 if ranks == 2 else 2)
    for layer in range(layers):
        if way == "data":
            numbers += (shapes[layer] + 1) * shapes[layer + 1]
        elif layer % 2:
            numbers += images * sequence * shapes[layer + 1]  # forward: behind the layer split by rows
        elif layer:
            numbers += images * sequence * shapes[layer]  # backward: before the layer split by columns
    return 8 * numbers * Fraction(2 * (ranks - 1), ranks)


@pytest.mark.parametrize("way", ways.NAMES)
def test_bytes_sent_are_those_of_the_tensors(way):
    for place in product((1, 64, 128), (1, 7), (16, 256), (4, 8), (2, 4)):
        assert ways.sent(way, *place) == by_hand(way, *place), place


def test_a_run_on_two_ranks_sends_what_the_formulae_say():
    records = ways.run("mpiexec -n 2 python three_ways.py --batch-size 256 --width 64").records
    assert ways.ways(records) == [*ways.NAMES] and "NOT" not in ways.same_training(records)
    for way in ways.NAMES:
        expected = ways.sent(way, 256, 1, 64, 4, 2)
        assert [ways.last_step(rank) for rank in ways.of(records, way)] == [expected] * 2
    assert f"{ways.sent('data', 256, 1, 64, 4, 2):,.0f} bytes of gradients" in ways.gradients_in_words(records)
    assert ways.partial_results_in_words(records).splitlines() == [
        f"all-reduce of {8 * 256 * numbers:,} bytes: 256 images x {numbers} numbers x 8 bytes"
        for numbers in (64, 10, 64)]


def test_a_run_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"exit code 2\nthree_ways.py: .*2 or 4 ranks, not 1"):
        ways.run("python three_ways.py")


@pytest.mark.parametrize("width, layers", [*product((64, 256, 1024, 4096), (4, 8, 16, 32))])
def test_data_and_tensor_send_equally_much_at_about_as_many_rows_as_the_width(width, layers):
    rows = ways.crossing(width, layers)
    assert ways.sent("data", rows, 1, width, layers, 2) == pytest.approx(ways.sent("tensor", rows, 1, width, layers, 2))
    assert 1 < rows / width < 1.5
    assert f"{rows:,.0f} rows a step" in ways.growth([], width, layers).axes[0].get_title("left")


def test_points_are_drawn_where_they_were_counted():
    records = [record(way, batch_size=batch, sent=[[["send", 1000 * batch]]])
               for way in ways.NAMES for batch in (64, 128)]
    for width, expected in ((256, [[64, 64], [128, 128]]), (64, [])):
        lines = ways.growth(records, width, 4).axes[0].lines
        assert [line.get_xydata().tolist() for line in lines if line.get_marker() == "o"] == [expected] * 3


def test_the_table_of_what_makes_it_more():
    once, twice = ([record(way, sent=[[["send", size]]]) for way, size in zip(ways.NAMES, sizes)]
                   for sizes in ((1_206_352, 267_264, 131_072), (1_206_352, 534_528, 393_216)))
    texts = [text.get_text() for text in ways.doubled(once, twice).axes[0].texts]
    columns = {way: texts[6 * number:6 * number + 6] for number, way in enumerate(ways.NAMES)}
    assert columns["pipeline"][:2] == ["131 kB", "393 kB    x 3"]  # as counted, whatever the formula says
    assert [text.partition(" x ")[2] for text in columns["data"][1:]] == ["1", "1", "3.7", "2.7", "1.5"]
    assert [text.partition(" x ")[2] for text in columns["tensor"][1:]] == ["2", "2", "2", "3", "1.5"]
    assert [text.partition(" x ")[2] for text in columns["pipeline"][2:]] == ["2", "2", "1", "2"]


def test_twice_the_layers_make_it_three_times_because_of_the_first_and_the_last_pair():
    four, eight = (ways.sent("tensor", 1, 1, 256, layers, 2) / ways.BYTES for layers in (4, 8))
    lacks = 256 + (256 - ways.CLASSES)  # the gradient of the images; what the last pair gives less
    assert eight + lacks == 2 * (four + lacks) and round(eight / four) == 3


@pytest.mark.parametrize("ranks", (2, 4, 64, 1024))
def test_data_parallelism_sends_at_most_twice_the_parameters_whatever_the_images(ranks):
    parameters = ways.BYTES * sum((inputs + 1) * outputs for inputs, outputs in ways.sizes(256, 4))
    few, many = (ways.sent("data", images, 1, 256, 4, ranks) for images in (1, 64))
    assert few == many and parameters <= few < 2 * parameters


@pytest.mark.parametrize("forward, backward", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("schedule", ways.SCHEDULES)
def test_the_bubble_is_the_formula_however_long_backward_takes(schedule, forward, backward):
    table = ways.slots([ways.order(schedule, stage, 4, 8) for stage in range(4)])
    free, end = [0] * 4, {}
    for stage, kind, number in sorted(table, key=table.get):  # what is needed comes before
        received = end.get((stage - 1 if kind == "forward" else stage + 1, kind, number), 0)
        length = forward if kind == "forward" else backward
        free[stage] = end[stage, kind, number] = max(free[stage], received) + length
    assert 1 - Fraction(8 * (forward + backward), max(free)) == Fraction(3, 11)


def test_words_follow_the_numbers():
    same, other = record("data"), record("tensor", difference=1e-3)
    lines = ways.same_training([same, other]).splitlines()
    assert lines[0].endswith(": as in one process") and lines[1].endswith(": NOT those of one process")
    assert "NOT" in ways.same_training([record("data", difference=float("nan"))])
    for kept, words in ((60, "60% of the activations, more than its share of 50%"),
                        (50, "50% of the activations, just its share"), (40, "40% of the activations, less than")):
        tensor = [record("tensor", rank, activations=kept) for rank in range(2)]
        stages = [record("pipeline", 0, labels=0, events=EVENTS, activations=30), record("pipeline", 1, events=EVENTS)]
        text = ways.held_in_words([record("alone"), *tensor, *stages])
        assert words in text and text.endswith("; rank 0 holds no labels.") and "Of the pipeline, its schedule" in text
    text = ways.held_in_words([record("alone"), *tensor, record("pipeline", events=EVENTS, activations=30)])
    assert text.endswith("every rank holds images and labels.")
    less = [record("pipeline", rank, events=EVENTS, activations=30) for rank in range(2)]
    text = ways.held_in_words([record("alone"), *tensor, *less])
    assert "The pipeline keeps less, because its schedule (1F1B, below) holds at most 2 of 4 micro-batches" in text
    assert ways.bubble_in_words(4, 16).startswith("Then move to 16: 3/19 = 16%.")
    sometimes = record("data", sent=[[["all-reduce", 8]], [], [["all-reduce", 8]]], start=[["broadcast", 16]])
    assert ways.gradients_in_words([sometimes]).startswith("In 2 of the 3 steps")
    assert ways.gradients_in_words([sometimes]).endswith("broadcast 16 bytes: its parameters.")


def test_bars_are_what_ranks_hold():
    records = [record("alone")] + [record(way, rank, parameters=30 + 10 * rank, images=0) for way in ways.NAMES
                                   for rank in range(2)]
    for axis in ways.held(records).axes:
        assert [bar.get_width() for bar in axis.patches] == pytest.approx([30, 100, 0, 100, 40, 100, 0, 100])
        texts = [text.get_text() for text in axis.texts]
        assert texts == ["30%", "100%", "none", "100%", "40%", "100%", "none", "100%"]


@pytest.mark.parametrize("stages, micro_batches", [*product(STAGES, MICRO_BATCHES)])
@pytest.mark.parametrize("schedule", ways.SCHEDULES)
def test_a_timetable_is_possible_and_its_bubble_is_the_formula(schedule, stages, micro_batches):
    orders = [ways.order(schedule, stage, stages, micro_batches) for stage in range(stages)]
    table = ways.slots(orders)
    assert len(table) == 2 * stages * micro_batches
    assert len({(stage, slot) for (stage, *_), slot in table.items()}) == len(table)  # one thing at a time
    for (stage, kind, number), slot in table.items():
        before = stage - 1 if kind == "forward" else stage + 1
        assert table.get((before, kind, number), -1) < slot  # what is needed has been received
        if kind == "backward":
            assert table[stage, "forward", number] < slot
    assert ways.idle(table, stages) == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    for stage, events in enumerate(orders):
        most = micro_batches if schedule == "GPipe" else min(micro_batches, stages - stage)
        assert ways.in_flight(events) == most


def test_the_title_says_the_bubble_that_is_drawn():
    figure = ways.timetables(4, 8)
    assert figure.get_suptitle() == "Bubble: (p - 1) / (m + p - 1) = 3 / 11 = 27% of the slots"
    for axis, kept in zip(figure.axes, ([4, 3, 2, 1], [8] * 4)):
        texts = [text.get_text() for text in axis.texts]
        assert [text for text in texts if "keeps" in text] == [f"keeps {most}" for most in kept]


def test_another_order_than_drawn_is_said():
    def events(schedule, stage):
        return [list(event) for event in ways.order(schedule, stage, 2, 4)]

    right = [record(way, stage, events=events(schedule, stage))
             for way, schedule in (("pipeline", "1F1B"), ("gpipe", "GPipe")) for stage in range(2)]
    assert ways.as_drawn(right).splitlines() == [
        f"{schedule:6}2 real ranks, 4 micro-batches: the drawn order; 20% of the slots are idle"
        for schedule in ("1F1B", "GPipe")]
    wrong = [one | {"way": {"pipeline": "gpipe", "gpipe": "pipeline"}[one["way"]]} for one in right]
    assert ways.as_drawn(wrong).count("ANOTHER order") == 2


def test_groups_of_the_cube():
    """Each rank has one partner in tensor and data, three in the pipeline; groups are the same for all their ranks."""
    ranks = range(16)
    for rank in ranks:
        found = ways.groups(rank)
        assert {way: len(group) for way, group in found.items()} == {"tensor": 2, "data": 2, "pipeline": 4}
        assert [other for other in ranks if sum(other in group for group in found.values()) > 1] == [rank]
        assert all(ways.groups(other)[way] == group for way, group in found.items() for other in group)
    assert ways.groups(6) == {"tensor": [6, 7], "data": [4, 6], "pipeline": [2, 6, 10, 14]}
    boxes = [patch for patch in ways.cube(6).axes[0].patches if isinstance(patch, Rectangle)]
    assert len(boxes) == 16


def test_arrows_are_as_thick_as_their_bytes():
    records = [record("data", rank, sent=[[["all-reduce", 500], ["all-reduce", 500]]]) for rank in range(2)]
    records += [record("tensor", rank, sent=[[["all-reduce", 2000]]]) for rank in range(2)]
    records += [record("pipeline", rank, sent=[[["send", 100 + 100 * rank]]]) for rank in range(2)]
    axis, = ways.arrows(records).axes
    arrows = [patch for patch in axis.patches if not isinstance(patch, Rectangle)]
    assert [arrow.get_linewidth() for arrow in arrows] == pytest.approx([5, 10, 0.5, 1])
    assert "2 all-reduces of gradients: 1 kB" in [text.get_text() for text in axis.texts]


def test_the_table_of_decisions_fits():
    """Each text within its box, and in the last row, which is higher, three lines."""
    figure = ways.decision()
    figure.draw_without_rendering()
    axis, = figure.axes
    right = {round(patch.get_x(), 2): patch.get_window_extent().x1 for patch in axis.patches}
    cells = [text for text in axis.texts if round(text.get_position()[0] - 0.08, 2) in right and text.get_text()]
    assert len(cells) == 15
    for text in cells:
        last = text.get_position()[1] == min(other.get_position()[1] for other in cells)
        assert text.get_text().count("\n") <= 1 + last, text.get_text()
        left = round(text.get_position()[0] - 0.08, 2)
        assert text.get_window_extent().x1 <= right[left], text.get_text()
