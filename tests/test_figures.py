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
from records import published
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import get_model

from tools.measuring import demo, reading
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


def demo_records(**changes):
    """The demo's published records, with some values changed."""
    return [record | changes if record["speed_up"] else record for record in published("demo.jsonl")]


DRAWN = {**figures.FIGURES,
         "demo, one program": lambda: demo.draw([each for each in demo_records() if each["chapter"] == "03_ddp"]),
         "demo without Horovod": lambda: demo.draw([each for each in demo_records() if each["chapter"][:2] != "02"]),
         "demo on a processor with a long name": lambda: demo.draw(demo_records(processor="Processor " * 9)),
         "demo with superlinear speed-up": lambda: demo.draw(demo_records(speed_up=3.5)),
         "demo that loses": lambda: demo.draw(demo_records(speed_up=0.05, step_seconds=2))}


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


def test_reading_s_headline_follows_its_numbers():
    records = pandas.DataFrame(published("read_data.jsonl"))
    words = figures.of_reading().legends[0].get_title().get_text()
    assert words == "Reading images: preloaded is fastest, mpi-io-default slowest"
    records.loc[(records["way"] == "files") & (records["ranks"] == 4), "warm_images_per_second"] = 1e8
    assert "preloaded or files is fastest" in reading.draw(records).legends[0].get_title().get_text()
