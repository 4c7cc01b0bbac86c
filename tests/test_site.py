"""The site builds without warnings and loads nothing from a network."""

import re
import sys

import pytest
from conftest import ROOT, run_command, tracked_files


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site. A broken link, a missing picture or an unlisted page is an error."""
    folder = tmp_path_factory.mktemp("site")
    result = run_command([sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs",
                          "-d", folder / "doctrees", ".", folder / "out"], cwd=ROOT, timeout=300)
    assert result.code == 0, result.err
    return folder / "out"


def test_each_page_exists_and_loads_nothing_from_a_network(site):
    sources = tracked_files([*ROOT.glob("[0-9]*/**/*.md"), *ROOT.glob("[0-9]*/*.ipynb")])
    assert len(sources) > 10
    for path in sources:
        text = (site / path.relative_to(ROOT).with_suffix(".html")).read_text()
        assert not re.search(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?:https?:)?//', text)
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"@import|url\(.?https?:", styles)
