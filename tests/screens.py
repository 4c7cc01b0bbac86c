"""Open notebooks in JupyterLab in a browser, as an instructor does, and measure what the audience sees.

    python -m tests.screens 05_zero/memory.ipynb                           # as it is stored
    python -m tests.screens --run --shots results 05_zero/memory.ipynb     # Run All Cells first; screenshots

A screen is what the notebook shows of itself at 1280 x 800 pixels in the simple interface. What is measured ends at the
last heading: below it is what is folded, for reading. Chromium has to be there.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.pages.style import TEXT

ROOT = Path(__file__).resolve().parent.parent
MOST, GAP = 9, 1.5  # screens: of a notebook, and without a figure
LEAST = 18  # pixels: the height of text in a figure
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none"},  # all cells are there to be measured
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
LEFT_OUT = shutil.ignore_patterns(".*", "data", "results", "tests")

STATE = """() => {
    const cells = [...window.jupyterapp.shell.currentWidget.content.model.cells].filter(cell => cell.type === 'code');
    const outputs = cells.flatMap(cell => cell.outputs.toJSON());
    return {waiting: cells.filter(cell => !cell.executionCount || cell.executionState === 'running').length,
            errors: outputs.filter(output => output.output_type === 'error').map(output => output.evalue)}; }"""

# Places in CSS pixels from the notebook's top. A figure is what the drawing functions made, or an image of a text cell.
PLACES = """() => {
    const book = document.querySelector('.jp-NotebookPanel .jp-Notebook');
    const zero = book.querySelector('.jp-Cell').getBoundingClientRect().top;
    const place = (element) => {
        const box = element.getBoundingClientRect();
        return {top: box.top - zero, bottom: box.bottom - zero, width: box.width}; };
    const shown = (selector) => [...book.querySelectorAll(selector)].filter(element => element.offsetHeight);
    const outer = document.querySelector('.jp-NotebookPanel .jp-WindowedPanel-outer') || book;
    const end = place(shown('.jp-MarkdownOutput h2').at(-1)).bottom;  // Run All has unfolded what is below
    return {screen: outer.clientHeight, end: end,
            headings: shown('.jp-RenderedHTMLCommon :is(h1, h2, h3, h4)').map(element =>
                ({...place(element), text: element.textContent.replace('¶', '')})),
            figures: shown('.jp-OutputArea-output img, .jp-MarkdownOutput img').map(element =>
                ({...place(element), natural: +element.getAttribute('width') || element.naturalWidth}))
                .filter(figure => figure.top < end)}; }"""


def listens(port):
    """Whether a program takes connections at this port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """The address of a JupyterLab on a copy of the workshop in the folder, with nobody's settings; {} is for a path."""
    shutil.copytree(ROOT, folder / "workshop", ignore=LEFT_OUT)
    for name, values in SETTINGS.items():
        path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    (folder / "settings" / "jupyter_lab_config.json").write_text(json.dumps({
        "LabApp": {"news_url": None, "check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
                   "expose_app_in_browser": True},
        "ServerApp": {"allow_root": True, "open_browser": False, "port": 0, "root_dir": str(folder / "workshop")}}))
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
             "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")
    log = folder / "lab.log"
    with open(log, "w") as file:
        server = subprocess.Popen([Path(sys.executable).parent / "jupyter-lab"], stdout=file, stderr=file, cwd=folder,
                                  env=os.environ | dict.fromkeys(names, str(folder / "settings")))
    try:
        for _ in range(600):
            found = re.search(r"(http://127\.0\.0\.1:(\d+))/lab\?(token=\w+)", log.read_text())
            if (found and listens(int(found[2]))) or server.poll() is not None:  # on a busy machine that comes later
                break
            time.sleep(0.1)
        if not found:
            raise RuntimeError(f"jupyter-lab does not start: {log.read_text()}")
        yield f"{found[1]}/doc/tree/{{}}?{found[3]}"
    finally:
        server.terminate()
        server.wait(20)


@contextmanager
def chromium() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def zoom(page, factor: float) -> None:
    """As the browser's zoom does: fewer, larger pixels for the page to lie in."""
    page.set_viewport_size({"width": round(1280 / factor), "height": round(800 / factor)})
    page.wait_for_timeout(500)


def opened(browser, address: str):
    """The page of a notebook on a screen of 1280 x 800 pixels."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(60_000)
    page.goto(address)
    page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell")
    if page.locator(".jp-Dialog").count():  # Select Kernel
        page.locator(".jp-Dialog .jp-mod-accept").click()
    kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel"
    page.wait_for_function(f"() => {kernel}?.status === 'idle'")
    page.wait_for_function("() => [...document.querySelectorAll('.jp-Notebook img')].every(image => image.complete)")
    page.wait_for_timeout(500)  # mathematics moves what comes below it
    return page


def run_all(page, seconds: int = 400) -> list[str]:
    """Clear the outputs, Run All Cells; the errors."""
    page.evaluate("() => window.jupyterapp.commands.execute('editmenu:clear-all')")
    page.evaluate("() => { window.jupyterapp.commands.execute('runmenu:run-all'); }")
    page.wait_for_function(f"() => {{ const now = ({STATE})(); return now.errors.length || !now.waiting; }}",
                           timeout=1000 * seconds)
    page.wait_for_timeout(1000)
    return page.evaluate(STATE)["errors"]


def measured(page, factor: float = 1) -> dict:
    """Of the open notebook: screens, the longest way to a figure and between two, text's height in pixels, and what is
    too tall for one screen with its heading. factor: the zoom."""
    places = page.evaluate(PLACES)
    screen, figures = places["screen"], places["figures"]
    ends = [0, *(figure["bottom"] for figure in figures)]
    gaps = [(figure["top"] - end) / screen for end, figure in zip(ends, figures)]
    tall = []
    for figure in figures:
        heading = max((heading for heading in places["headings"] if heading["top"] < figure["top"]),
                      key=lambda heading: heading["top"])
        tall.append((round((figure["bottom"] - heading["top"]) / screen, 2), heading["text"]))
    text = [TEXT / 72 * 96 * figure["width"] / figure["natural"] * factor for figure in figures]
    return {"screens": round(places["end"] / screen, 2), "figures": len(figures), "first": round(gaps[0], 2),
            "gap": round(max(gaps), 2), "text": round(min(text), 1), "with heading": tall,
            "gaps": [round(gap, 2) for gap in gaps]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--run", action="store_true", help="Run All Cells first")
    parser.add_argument("--shots", type=Path, help="save a picture of each screen into this folder")
    parser.add_argument("--zoom", type=float, default=1)
    args = parser.parse_args()
    with TemporaryDirectory() as folder, jupyterlab(Path(folder)) as address, chromium() as browser:
        for path in args.notebooks:
            page = opened(browser, address.format(path.resolve().relative_to(ROOT)))
            if args.run:
                print("errors:", run_all(page))
            zoom(page, args.zoom)
            found = measured(page, args.zoom)
            print(path, *(f"  {name}: {value}" for name, value in found.items()), sep="\n")
            for number in range(int(found["screens"]) + 1 if args.shots else 0):
                page.evaluate("""number => { const outer = document.querySelector('.jp-WindowedPanel-outer');
                    outer.scrollTop = number * outer.clientHeight; }""", number)
                page.wait_for_timeout(200)
                args.shots.mkdir(exist_ok=True)
                page.screenshot(path=args.shots / f"{path.stem}_{number + 1}.png")
            page.close()


if __name__ == "__main__":
    main()
