"""Figures and the recording are up to date; site and slides load nothing from a network."""

import csv
import json
import re
import sys

import pytest
from conftest import ROOT, run_command, tracked_files
from matplotlib.testing.compare import compare_images

from cluster.records import FIGURES
from tools import style
from tools.pages import cast, figures


@pytest.mark.check
@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_match_their_records(name, tmp_path):
    figures.FIGURES[name]().savefig(tmp_path / name, dpi=style.DPI)
    assert not compare_images(FIGURES / name, tmp_path / name, tol=3), "make docs"


@pytest.mark.check
def test_figures_of_notebooks_are_the_notebooks():
    for name, cell in figures.FROM_NOTEBOOKS.items():
        assert (FIGURES / name).read_bytes() == figures.read_figure(*cell), "make docs"


def build_pages(*arguments):
    result = run_command([sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", *arguments],
                         cwd=ROOT)
    assert result.code == 0, result.err


def assert_nothing_remote(folder):
    """Assert that no page, and no style sheet that a page names, loads anything from a network."""
    for path in folder.glob("**/*.html"):
        if path.is_relative_to(folder / "_static"):  # reveal.js's own pages
            continue
        page = path.read_text()
        assert not re.search(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?:https?:)?//', page)
        for name in re.findall(r'<link[^>]*href="([^"?]+\.css)', page):
            sheet = (path.parent / name).read_text()
            assert not re.search(r"(@import|url\().{0,5}(https?:)?//", sheet), name


@pytest.mark.check
def test_slides_fit_into_half_a_day_and_load_nothing_from_a_network(tmp_path):
    build_pages("-b", "revealjs", "-c", "tools/pages/slides", "docs", tmp_path)
    assert_nothing_remote(tmp_path)
    source = (ROOT / "docs/slides.md").read_text()
    assert len(re.findall(r"\S*[^\W_]\S*", source)) <= 3000  # words
    slides = re.findall(r'^#+ (.+?)\n.*?^<aside class="notes">\n\n(\d):(\d\d)\. ', source,
                        re.M | re.S)
    page = (tmp_path / "slides.html").read_text()
    timings = re.findall('data-timing="([0-9]+)"', page)
    assert len(slides) == len(timings) <= 30 and sum(map(int, timings)) == 4 * 3600
    assert 'href="../03_ddp/allreduce.html"' in page  # of the site
    minutes = [60 * int(hour) + int(minute) for _, hour, minute in slides]
    assert minutes == sorted(set(minutes))
    keyboard = {start: int(title.split()[2]) for (title, *_), start in zip(slides, minutes)
                if title.startswith("Now you")}
    for start, end in zip(minutes, minutes[1:]):
        assert keyboard.get(start, end - start) == end - start
    assert sum(keyboard.values()) >= 90
    assert f"{sum(keyboard.values())} minutes" in (ROOT / "docs/TEACHING.md").read_text()


@pytest.mark.check
def test_recording_takes_two_minutes_and_shows_the_commands_of_its_program():
    _, *events = map(json.loads, cast.CAST.read_text().splitlines())
    text = "".join(output for _, _, output in events)
    times = [time for time, _, _ in events]
    assert times == sorted(times) and times[-1] <= 120
    assert all(f"$ {line}\r\n" in text for line, *_ in cast.SCENES), "python -m tools.pages.cast"
    assert not re.search(r"/(?:tmp|home|work)\b|Error|Traceback", text)


@pytest.mark.check
def test_the_most_frequent_messages_are_found_on_the_page():
    page = (ROOT / "docs/WHAT_GOES_WRONG.md").read_text()
    text = re.sub(r"\]\([^)]*\)|`", "", page).lower()
    with (ROOT / "assets/records/messages.csv").open() as file:
        messages = [row["message"] for row in csv.DictReader(file)]
    assert len(messages) == 40
    assert [message for message in messages if message.lower() not in text] == []


def test_each_page_of_the_site_exists_and_loads_nothing_from_a_network(tmp_path):
    """A broken link, a missing picture or an unlisted page is an error."""
    build_pages("-c", "docs", "-d", tmp_path / "doctrees", ".", tmp_path / "out")
    sources = tracked_files([*ROOT.glob("[0-9]*/**/*.md"), *ROOT.glob("[0-9]*/*.ipynb"),
                             ROOT / "docs/PLAN.md"])
    assert len(sources) > 10
    for path in sources:
        assert (tmp_path / "out" / path.relative_to(ROOT).with_suffix(".html")).exists()
    assert_nothing_remote(tmp_path / "out")
