"""Open notebooks in JupyterLab in a browser, as an instructor does, and take a picture of each screen.

    python -m tests.screens --shots results 05_zero/memory.ipynb           # as it is stored
    python -m tests.screens --run --shots results 05_zero/memory.ipynb     # Run All Cells first

A screen is what the notebook shows of itself at 1280 x 800 pixels in the simple interface. Chromium has to be there.
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

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none"},  # all cells are there
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
LEFT_OUT = shutil.ignore_patterns(".*", "data", "results", "tests")

RUN = """async () => {
    await window.jupyterapp.commands.execute('editmenu:clear-all');
    return window.jupyterapp.commands.execute('notebook:run-all-cells'); }"""
OUTER = "document.querySelector('.jp-WindowedPanel-outer')"


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


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--run", action="store_true", help="Run All Cells first")
    parser.add_argument("--shots", type=Path, required=True, help="save a picture of each screen into this folder")
    args = parser.parse_args()
    args.shots.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, jupyterlab(Path(folder)) as address, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for path in args.notebooks:
            page = opened(browser, address.format(path.resolve().relative_to(ROOT)))
            if args.run:
                print(path, "runs:", page.evaluate(RUN))
            for number in range(page.evaluate(f"Math.ceil({OUTER}.scrollHeight / {OUTER}.clientHeight)")):
                page.evaluate(f"{OUTER}.scrollTop = {number} * {OUTER}.clientHeight")
                page.wait_for_timeout(200)
                page.screenshot(path=args.shots / f"{path.stem}_{number + 1}.png")


if __name__ == "__main__":
    main()
