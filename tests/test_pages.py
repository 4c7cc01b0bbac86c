"""Figures and the recording are up to date; site and slides load nothing from a network."""

import json
import re
import sys
from importlib.util import find_spec

import pytest
from conftest import GIT_FILES, ROOT, run_command, tracked_files
from matplotlib.testing.compare import compare_images

from cluster.records import FIGURES
from tools import style
from tools.pages import cast, figures, slides


@pytest.mark.check
@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_match_their_records(name, tmp_path):
    figures.FIGURES[name]().savefig(tmp_path / name, dpi=style.DPI)
    assert not compare_images(FIGURES / name, tmp_path / name, tol=3), "make docs"


@pytest.mark.check
def test_figures_of_notebooks_are_the_notebooks():
    for name, cell in figures.FROM_NOTEBOOKS.items():
        assert (FIGURES / name).read_bytes() == figures.read_figure(*cell), "make docs"


@pytest.mark.check
def test_slides_are_one_file_with_all_figures_that_loads_nothing():
    parts = slides.read_slides()
    page = slides.render(parts)
    pictures = re.findall(r"!\[[^]]+\]\((\S+)\)", slides.SOURCE.read_text())
    assert page.count('src="data:image/') == len(pictures) >= 15
    assert not re.search(r'src="(?!data:)|@import|url\(|<link', page)
    assert page.count("<section>") == page.count("<aside>") == len(parts)


@pytest.mark.check
def test_recording_takes_two_minutes_and_shows_commands_that_exist():
    _, *events = map(json.loads, cast.CAST.read_text().splitlines())
    text = "".join(output for _, _, output in events)
    times = [time for time, _, _ in events]
    assert times == sorted(times) and times[-1] <= 120
    assert all(f"$ {line}\r\n" in text for line, *_ in cast.SCENES), "python -m tools.pages.cast"
    assert not re.search(r"/(?:tmp|home|work)\b|Error|Traceback", text)
    commands = " ".join(line for line, *_ in cast.SCENES)
    assert all((ROOT / name).exists() for name in re.findall(r"\b0\w+/\w+\.py", commands))
    assert all(map(find_spec, re.findall(r"-m ([.\w]+)", commands)))
    code = "".join(path.read_text() for path in GIT_FILES if path.suffix == ".py")
    assert all(re.search(f'"(?:--)?{flag}"', code) for flag in re.findall("--([a-z-]+)", commands))


def test_each_page_of_the_site_exists_and_loads_nothing_from_a_network(tmp_path):
    """A broken link, a missing picture or an unlisted page is an error."""
    result = run_command([sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs",
                          "-d", tmp_path / "doctrees", ".", tmp_path / "out"], cwd=ROOT)
    assert result.code == 0, result.err
    sources = tracked_files([*ROOT.glob("[0-9]*/**/*.md"), *ROOT.glob("[0-9]*/*.ipynb"),
                             ROOT / "docs/PLAN.md", ROOT / "README.md"])
    assert len(sources) > 10
    for path in sources:
        text = (tmp_path / "out" / path.relative_to(ROOT).with_suffix(".html")).read_text()
        assert not re.search(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?:https?:)?//', text)
    styles = "".join(path.read_text() for path in tmp_path.glob("out/**/*.css"))
    assert not re.search(r"@import|url\(.?https?:", styles)
