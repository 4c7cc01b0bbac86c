"""The READMEs' pictures: each is drawn by code that is here, can be read on any page, and shows what is true."""

import gc
import re

import pytest
import torch
import torch.distributed as dist
from conftest import LESSONS, ROOT, tracked
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text
from records import published
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import get_model

from tools import style
from tools.measuring import demo
from tools.pages import docs, drawings, figures

PICTURES = sorted((ROOT / "assets" / "figures").glob("*.png"))


@pytest.mark.check
def test_every_lesson_has_a_row_of_the_demo():
    assert LESSONS.keys() == {run[0] for run in demo.RUNS}


@pytest.mark.check
def test_every_picture_is_drawn_by_code_shown_and_readable_on_a_dark_page():
    """With an alternative text; opaque, or black text would be lost where the page shines through."""
    shown = [(path.parent / address, text) for path in tracked(docs.readmes())
             for text, address in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", path.read_text())]
    assert {path.name for path in PICTURES} == figures.FIGURES.keys()
    assert {path.resolve() for path, _ in shown} == set(PICTURES)
    assert not [path for path, text in shown if len(text) < 20]
    assert not [path for path in PICTURES if (imread(path)[:, :, 3] < 1).any()]


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
    return [{"others": 0.0} | record | changes if record["speed_up"] else record for record in published("demo.jsonl")]


DRAWN = {**figures.FIGURES,  # and the demo's on other machines
         "demo without Horovod": lambda: demo.draw([each for each in demo_records() if each["chapter"][:2] != "02"]),
         "demo on a processor with a long name": lambda: demo.draw(demo_records(processor="Processor " * 9)),
         "demo that loses": lambda: demo.draw(demo_records(speed_up=0.05, step_seconds=2))}


def words_shown(figure, renderer):
    """(words, box) of every text that is drawn; tick labels beyond an axis's limits are not."""
    beyond = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_major_ticks()
              for label in (tick.label1, tick.label2)
              if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())}
    return [(text, text.get_window_extent(renderer)) for text in figure.findobj(Text)
            if text.get_visible() and text.get_text().strip() and text not in beyond]


@pytest.mark.check
@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_can_be_read_from_the_last_row(name):
    figure = DRAWN[name]()
    assert figure.get_figwidth() == style.WIDTH and figure.get_figheight() <= 5.6
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    shown = words_shown(figure, canvas.get_renderer())
    assert min(text.get_fontsize() for text, _ in shown) / 72 * 96 >= 18  # pixels
    for number, (text, box) in enumerate(shown):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
        assert not [other for other, place in shown[:number] if box.overlaps(place)], text


@pytest.mark.check
def test_scaling_is_drawn_from_its_records_and_hollow_where_ranks_share_a_core():
    _, _, *efficiencies = figures.scaling().axes
    for name, axis in zip(("weak", "strong"), efficiencies):
        _, found, _ = figures.measured(name)
        drawn = {round(value, 6): line.get_markerfacecolor() for line in axis.lines if line.get_marker() == "o"
                 for value in line.get_ydata()}  # hollow markers are drawn last
        assert drawn.keys() == {round(value, 6) for value in found["efficiency"]}
        hollow = {value for value, color in drawn.items() if color == "white"}
        assert hollow == {round(row.efficiency, 6) for row in found.itertuples() if row.ranks > row.cpus}
