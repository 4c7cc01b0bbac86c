"""The slides of docs/slides.md: they build, fit the half day, and take their numbers from pages."""

import re

import pytest
from conftest import ROOT

from tools.pages import slides

pytestmark = pytest.mark.check
SLIDES = slides.read_slides()


def words(text):
    """Return a slide's text without figures, code and comments."""
    return re.sub(r"```.*?```|<!--.*?-->|!\[.*?\]\(.*?\)|`[^`]*`", "", text, flags=re.S)


def numbers(text):
    """Return the numbers of two digits or more, except times and parts of names."""
    found = re.findall(r"(?<![\w.:-])\d[\d,.]*\d(?![\w:])", text)
    return {re.sub(r"\.0+$", "", number) for number in found}


def test_slides_are_one_file_with_all_figures_that_loads_nothing():
    page = slides.render(SLIDES)
    figures = re.findall(r"!\[[^]]+\]\((\S+)\)", slides.SOURCE.read_text())
    assert page.count('src="data:image/') == len(figures) >= 15
    assert not re.search(r'src="(?!data:)|@import|url\(|<link', page)
    assert page.count("<section>") == page.count("<aside>") == len(SLIDES)


def test_slides_are_as_many_and_as_long_as_the_half_day():
    minutes = [slide.minute for slide in SLIDES]
    assert 40 <= len(SLIDES) <= 60
    assert minutes == sorted(set(minutes)) and minutes[0] == 0 and minutes[-1] < 240
    timetable = (ROOT / "docs/TEACHING.md").read_text()
    starts = {60 * int(hour) + int(minute)
              for hour, minute in re.findall(r"^\| (\d):(\d\d)", timetable, re.M)}
    assert len(starts) == 7 and starts <= set(minutes)


@pytest.mark.parametrize("slide", SLIDES, ids=lambda slide: f"{slide.minute}")
def test_slide_is_short_and_its_numbers_are_on_a_page_that_its_notes_link(slide):
    assert len(re.findall(r"\w*[a-zA-Z]\w*", words(slide.body))) <= 35
    for code in re.findall(r"```\w*\n(.*?)```", slide.body, re.S):
        assert code.count("\n") <= 12
    paths = re.findall(r"\]\(([^)#:]+\.(?:md|ipynb))(?:#[^)]*)?\)", slide.notes)
    pages = [(slides.SOURCE.parent / path).read_text().replace("\\n", " ") for path in paths]
    notes = re.sub(r"\]\(.*?\)", "]", slide.notes)
    assert paths and numbers(words(f"{slide.body}\n{notes}")) <= numbers(" ".join(pages))
