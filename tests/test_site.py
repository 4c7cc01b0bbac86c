"""The site: it builds without a warning, opens without a network, and its search answers."""

import re
import shutil
import sys

import pytest
from conftest import ROOT, execute, tracked
from playwright.sync_api import sync_playwright

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site. A broken link, a missing picture, a page outside of the contents end it."""
    folder = tmp_path_factory.mktemp("site")
    done = execute([sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs",
                    "-d", folder / "doctrees", ".", folder / "out"], cwd=ROOT, timeout=300)
    assert done.code == 0, done.err
    return folder / "out"


def test_each_page_and_notebook_is_there_and_fetches_nothing(site):
    sources = tracked([*ROOT.glob("[0-9]*/**/*.md"), *ROOT.glob("[0-9]*/*.ipynb")])
    assert len(sources) > 10
    for path in sources:
        text = (site / path.relative_to(ROOT).with_suffix(".html")).read_text()
        assert not re.search(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(?:https?:)?//', text)
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"@import|url\(.?https?:", styles)


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no chromium here: apt install chromium")
def test_in_a_browser_without_a_network_pages_open_and_search_answers(site):
    requested = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(offline=True).new_page()
        page.on("request", lambda request: requested.append(request.url))
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            page.wait_for_load_state("networkidle")
        page.goto((site / "search.html").as_uri() + "?q=hang")
        page.wait_for_selector("#search-results li a")
        assert page.locator("#search-results li").count() > 3
        browser.close()
    assert not [url for url in requested if not url.startswith(("file:", "data:"))]
