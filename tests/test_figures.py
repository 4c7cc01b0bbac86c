"""The figures: all that pages show exist, and those of records match the records."""

import re

import pytest
from conftest import ROOT, tracked
from matplotlib.testing.compare import compare_images

from tools import style
from tools.pages import docs, figures

FOLDER = ROOT / "assets" / "figures"


@pytest.mark.check
def test_figures_are_those_that_pages_show():
    pages = tracked([*docs.pages(), *ROOT.glob("0*/*.ipynb")])
    shown = {(path.parent / address).resolve() for path in pages
             for address in re.findall(r"[./\w]+figures/[\w]+[.]\w+", path.read_text())}
    assert shown == set(FOLDER.iterdir())


@pytest.mark.check
@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_shows_the_records_that_are_here(name, tmp_path):
    figures.FIGURES[name]().savefig(tmp_path / name, dpi=style.DPI)
    assert not compare_images(FOLDER / name, tmp_path / name, tol=3), "make docs"
