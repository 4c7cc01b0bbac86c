"""The READMEs' pictures: each is drawn by code that is here, can be read on any page, and shows what is true."""

import gc
import re

import pandas
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text
from paying_runs import left_out, paying_run
from records import published
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import get_model

from tools.measuring import demo, paying, reading
from tools.pages import docs, drawings, figures, style

PICTURES = sorted((ROOT / "assets" / "figures").glob("*.png"))


def shown():
    """(README, alternative text, address) of every picture in a README."""
    return [(path, *found) for path in docs.readmes()
            for found in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", path.read_text())]


def test_every_picture_is_drawn_by_code_and_shown():
    assert {path.name for path in PICTURES} == figures.FIGURES.keys()
    assert {(path.parent / address).resolve() for path, _, address in shown()} == set(PICTURES)


def test_every_picture_has_alternative_text():
    assert not [address for _, text, address in shown() if len(text) < 20]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_opaque(path):
    """On a dark page black text would be lost on a background that lets the page through."""
    assert (imread(path)[:, :, 3] == 1).all()


@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 7))
def test_the_ring_sums_each_part_once_in_the_fewest_bytes(ranks):
    steps, end = drawings.ring_all_reduce(ranks)
    assert len(steps) == 2 * (ranks - 1)  # in each, every rank sends one of its chunks
    assert all(len(sends) == ranks for _, sends in steps)
    assert all(sorted(parts) == list(range(ranks)) for row in end for parts in row)


def test_the_average_is_the_gradient_of_the_whole_batch():
    own = [drawings.gradient(drawings.WEIGHT, points) for points in drawings.POINTS]
    whole = torch.tensor(sum(drawings.POINTS, ()), dtype=torch.float64)
    weight = torch.tensor(drawings.WEIGHT, dtype=torch.float64, requires_grad=True)
    ((weight * whole[:, 0] - whole[:, 1]) ** 2 / 2).mean().backward()
    assert len(set(own)) == len(own) and sum(own) / len(own) == weight.grad.item()


def test_the_buckets_are_those_of_a_run():
    sizes = []

    def count(_, bucket):
        sizes.append(bucket.buffer().nbytes)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model = get_model("resnet18", num_classes=10)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, count)
        for _ in range(2):
            ddp(torch.zeros(2, 3, 32, 32)).sum().backward()
        del ddp
        gc.collect()  # before the process group goes
    finally:
        dist.destroy_process_group()
    drawn = [sum(bucket) for bucket in drawings.buckets(model)]
    assert sizes == [sum(drawn), *drawn]  # a single bucket in the first step


def demo_records(keep=None, **changes):
    """The demo's published records, or those that a query keeps, with some columns changed."""
    records = pandas.DataFrame(published("demo.jsonl"))
    return (records.query(keep) if keep else records).reset_index(drop=True).assign(**changes)


def on_more_ranks():
    """The digits of a demo on 1, 2 and 4 ranks, the last of them with other accuracies."""
    digits = "dataset == 'digits'"
    more = demo_records(f"{digits} and ranks == 2", ranks=4, test_accuracy=0.9)
    return pandas.concat([demo_records(digits), more]).reset_index(drop=True)


def without_link():
    """A demo on a machine where there can be no lab."""
    weak = [paying_run(1, 1000), paying_run(2, 1600), left_out()]
    return pandas.concat([demo_records("dataset == 'digits'"), pandas.DataFrame(weak)])


DRAWN = {**figures.FIGURES,
         "demo, one run": lambda: demo.draw(demo_records("chapter == '03_ddp' and ranks == 2")),
         "demo without Horovod": lambda: demo.draw(demo_records("not chapter.str.contains('horovod|tf')")),
         "demo on a processor with a long name": lambda: demo.draw(demo_records(processor="Processor " * 9)),
         "demo where no link can be": lambda: demo.draw(without_link()),
         "demo on 1, 2 and 4 ranks": lambda: demo.draw(on_more_ranks())}


def words_shown(figure, renderer):
    """(words, box) of every text that is drawn; tick labels beyond an axis's limits are not."""
    beyond = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_major_ticks()
              for label in (tick.label1, tick.label2)
              if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())}
    return [(text, text.get_window_extent(renderer)) for text in figure.findobj(Text)
            if text.get_visible() and text.get_text().strip() and text not in beyond]


IN_NOTEBOOKS = set(re.findall(r"assets/figures/(\w+\.png)", "".join(
    path.read_text() for path in ROOT.glob("*/*.ipynb"))))


def test_the_smallest_text_is_18_pixels_high():
    assert style.TEXT / 72 * 96 >= 18


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_can_be_read_from_the_last_row(name):
    figure = DRAWN[name]()
    assert figure.get_figwidth() == style.WIDTH
    assert figure.get_figheight() <= (4.6 if name in IN_NOTEBOOKS else 5.6)  # a notebook's has its heading above it
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    shown = words_shown(figure, canvas.get_renderer())
    assert min(text.get_fontsize() for text, _ in shown) >= style.TEXT
    for number, (text, box) in enumerate(shown):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
        assert not [other for other, place in shown[:number] if box.overlaps(place)], text


def test_the_formula_s_line_goes_through_no_number():
    figure = figures.zero()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axis in figure.axes:
        numbers = [text.get_window_extent(canvas.get_renderer()) for text in axis.texts]
        lines = [line.get_window_extent(canvas.get_renderer()) for line in axis.lines]
        assert len(numbers) == len(lines) == 4
        assert not [line for line in lines for number in numbers if line.overlaps(number)]


def test_scaling_shows_efficiency_on_the_same_axes_and_hollow_where_ranks_share_a_core():
    figure = figures.scaling()
    weak, strong, *efficiencies = figure.axes
    assert weak.get_ylim() == strong.get_ylim() and len({axis.get_ylim() for axis in efficiencies}) == 1
    for name, axis in zip(("weak", "strong"), efficiencies):
        _, found, _ = figures.measured(name)
        drawn = {round(value, 6): line.get_markerfacecolor() for line in axis.lines if line.get_marker() == "o"
                 for value in line.get_ydata()}  # hollow markers are drawn last
        assert drawn.keys() == {round(value, 6) for value in found["efficiency"]}
        hollow = {value for value, color in drawn.items() if color == "white"}
        assert hollow == {round(row.efficiency, 6) for row in found.itertuples() if row.ranks > row.cpus}


@pytest.mark.parametrize(("accuracies", "speeds", "weak", "said"), [
    ((0.98, 0.98), (10, 20), (10, 19, 5), "Do 2 ranks pay? Digits: in 1 of 1 programs; resnet18: yes; at 1 Gbit/s: no"),
    ((0.98, 0.95), (20, 10), (10, 9, 10),
     "Do 2 ranks pay? Digits: in 0 of 1 programs; resnet18: no; at 1 Gbit/s: just even"),
    ((0.98, 0.98), (10, 20), (), "Do 2 ranks pay? Digits: in 1 of 1 programs"),
    ((0.98,), (10,), (), "One run of each program: nothing to compare")])
def test_the_demo_s_headline_follows_its_numbers(accuracies, speeds, weak, said):
    records = [paying_run(ranks, speed, dataset="digits", model="cnn", test_accuracy=accuracy)
               for ranks, accuracy, speed in zip((1, 2), accuracies, speeds)]
    slower = [paying_run(ranks, speed, link=link) for ranks, speed, link in zip((1, 2, 2), weak, (None, None, "1gbit"))]
    assert demo.verdict(pandas.DataFrame(records + slower)) == said
    assert demo.verdict(pandas.DataFrame(records[::-1] + slower)) == said
    same = "the same accuracy" if len(set(accuracies)) == 1 else "accuracies within 0.0300"
    assert demo.accuracies(pandas.DataFrame(records + slower)) == same


def test_the_demo_s_bars_are_shares_of_a_step_and_pass_the_line_where_ranks_pay():
    found = {each["name"]: each for each in paying.compared(demo_records("dataset == 'digits'"))}
    assert {"03_ddp", "04_deepspeed"} < found.keys() and "05_zero, stage 3" not in found  # which nothing is beside
    for each in found.values():
        assert (each["share"] > each["even"]) == (each["ratio"] > 1)
        assert round(each["share"], 6) == round(each["computing"] / (each["computing"] + each["waiting"]), 6)


def test_reading_s_headline_follows_its_numbers():
    records = pandas.DataFrame(published("read_data.jsonl"))
    words = figures.of_reading().legends[0].get_title().get_text()
    assert words == "Reading images: preloaded is fastest, mpi-io-default slowest"
    records.loc[(records["way"] == "files") & (records["ranks"] == 4), "warm_images_per_second"] = 1e8
    assert "preloaded or files is fastest" in reading.draw(records).legends[0].get_title().get_text()
