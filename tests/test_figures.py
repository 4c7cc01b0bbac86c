"""The figures: pages show all of them, and those drawn from records match the records."""

import re

import pytest
from conftest import ROOT, tracked_files
from matplotlib.testing.compare import compare_images

from tools import style
from tools.pages import docs, figures

FOLDER = ROOT / "assets" / "figures"


@pytest.mark.check
def test_pages_show_each_figure_and_no_other():
    pages = tracked_files([*docs.pages(), *ROOT.glob("0*/*.ipynb")])
    figures_on_pages = {(path.parent / address).resolve() for path in pages
                        for address in re.findall(r"[./\w]+figures/[\w]+[.]\w+", path.read_text())}
    assert figures_on_pages == set(FOLDER.iterdir())


@pytest.mark.check
@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_match_their_records(name, tmp_path):
    figures.FIGURES[name]().savefig(tmp_path / name, dpi=style.DPI)
    assert not compare_images(FOLDER / name, tmp_path / name, tol=3), "make docs"
