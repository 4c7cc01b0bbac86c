"""The slides of docs/slides.md build into one file."""

import re

import pytest

from tools.pages import slides


@pytest.mark.check
def test_slides_are_one_file_with_all_figures_that_loads_nothing():
    parts = slides.read_slides()
    page = slides.render(parts)
    figures = re.findall(r"!\[[^]]+\]\((\S+)\)", slides.SOURCE.read_text())
    assert page.count('src="data:image/') == len(figures) >= 15
    assert not re.search(r'src="(?!data:)|@import|url\(|<link', page)
    assert page.count("<section>") == page.count("<aside>") == len(parts)
