"""The site: it builds without a warning, all of it opens without a network, and its search answers."""

import re
import shutil
import sys

import nbformat
import pytest
from conftest import ROOT, execute, tracked
from playwright.sync_api import sync_playwright

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Broken links, pictures that are missing and pages outside of the table of contents are warnings, so errors."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-d", folder / "doctrees", "."]
    done = execute([*words, folder / "out"], cwd=ROOT, timeout=300)
    assert done.code == 0, done.err
    return folder / "out"


def test_each_page_and_notebook_is_there_and_fetches_nothing(site):
    sources = tracked([*ROOT.glob("[0-9]*/**/README.md"), *ROOT.glob("[0-9]*/*.ipynb"), *ROOT.glob("docs/*.md")])
    assert len(sources) > 15
    for path in sources:
        text = (site / path.relative_to(ROOT).with_suffix(".html")).read_text()
        figures = re.findall(r'<img [^>]*src="(?!data:)([^"]+)"', text)
        assert all((site / path.relative_to(ROOT)).parent.joinpath(figure).exists() for figure in figures), path
        assert path.suffix != ".ipynb" or len(figures) > 4, path
        assert not re.search(r"""<(?:script|img|link|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//""", text), path
    assert not re.search(r"@import|url\(.?https?:", "".join(path.read_text() for path in site.rglob("*.css")))


@pytest.mark.check
def test_pictures_have_texts():
    texts = [path.read_text() for path in tracked(ROOT.glob("**/*.md"))]
    for path in tracked(ROOT.glob("[0-9]*/*.ipynb")):
        texts += [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown"]
    assert not [text for text in texts if re.search(r"!\[\s*\]\(|<img (?![^>]*alt=)", text)]
    assert sum("![" in text or "<img " in text for text in texts) > 8


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no chromium here: apt install chromium")
def test_in_a_browser_without_a_network_pages_open_and_search_answers(site):
    asked = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(offline=True).new_page()
        page.on("request", lambda request: asked.append(request.url))
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            page.wait_for_load_state("networkidle")
        page.goto((site / "search.html").as_uri() + "?q=hang")
        page.wait_for_selector("#search-results li a")
        assert page.locator("#search-results li").count() > 3
        browser.close()
    assert len(asked) > 40 and not [url for url in asked if not url.startswith(("file:", "data:"))]
