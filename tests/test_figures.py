"""The READMEs' pictures: each is drawn by code that is here, can be read on any page, and shows what is true."""

import gc
import re

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import get_model

from tools.pages import docs, drawings, figures

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


@pytest.mark.parametrize("draw", drawings.DRAWINGS, ids=lambda draw: draw.__name__)
def test_a_drawing_s_words_are_whole_and_apart(draw):
    figure = draw()
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in figure.axes[0].texts if text.get_text()]
    for words, box in boxes:
        assert box.x0 > 0 and box.y0 > 0 and box.x1 < figure.bbox.x1 and box.y1 < figure.bbox.y1, words
    for number, (words, box) in enumerate(boxes):
        assert not [other for other, place in boxes[:number] if box.overlaps(place)], words


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
