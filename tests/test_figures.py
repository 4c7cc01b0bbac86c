"""The figures match the records that they are drawn from."""

import pytest
from conftest import ROOT
from matplotlib.testing.compare import compare_images

from tools import style
from tools.pages import figures

FOLDER = ROOT / "assets" / "figures"


@pytest.mark.check
@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_match_their_records(name, tmp_path):
    figures.FIGURES[name]().savefig(tmp_path / name, dpi=style.DPI)
    assert not compare_images(FOLDER / name, tmp_path / name, tol=3), "make docs"


@pytest.mark.check
def test_figures_of_notebooks_are_the_notebooks():
    for name, cell in figures.FROM_NOTEBOOKS.items():
        assert (FOLDER / name).read_bytes() == figures.read_figure(*cell), "make docs"
