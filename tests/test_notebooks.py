"""The notebooks: they run from top to bottom, say the same again, and were stored with what they need as it is now."""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tokenize

import nbformat
import pytest
from conftest import BIN, ROOT, execute
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from tools.pages import notebooks, ready

PATHS = notebooks.notebooks()
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def load(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(cell):
    """What a cell has put out, but for pictures and for names that a run makes up."""
    texts = []
    for output in cell.outputs:
        for kind, text in {"stream": output.get("text"), **output.get("data", {})}.items():
            if text and not kind.startswith("image/"):
                texts.append((kind, re.sub(r"T_[0-9a-f]{5}|\b0x[0-9a-f]+", "#", text)))
    return sorted(texts)


def pictures(cell):
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def test_the_five_are_there():
    assert {path.stem for path in PATHS} == {
        "batch_size", "allreduce", "model_vs_data_parallelism", "scaling", "memory"}


@each_notebook
def test_it_runs_and_says_what_is_stored(path):
    stored, again = load(path), notebooks.run(path)
    assert len(code(stored)) == len(code(again))
    for old, new in zip(code(stored), code(again)):
        assert pictures(new) == pictures(old), new.source
        if "live" not in new.metadata.get("tags", []):
            assert said(new) == said(old), new.source
    assert any(pictures(cell) for cell in code(again))


@each_notebook
def test_it_was_stored_with_the_code_and_records_that_are_here(path):
    notebook = load(path)
    assert notebook.metadata["workshop"]["sha256"] == notebooks.fingerprint(notebook), f"make notebooks ({path.stem})"
    assert all(cell.execution_count for cell in code(notebook)) and not [
        output for cell in code(notebook) for output in cell.outputs if output.output_type == "error"]


def test_another_cell_or_another_record_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "assets" / "records").mkdir(parents=True)
    (tmp_path / "assets" / "records" / "weak.jsonl").write_text("1")
    notebook = new_notebook(cells=[new_code_cell('ready.needs("assets/records/weak.jsonl")'), new_code_cell("1 + 1")])
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    before = notebooks.fingerprint(notebook)
    (tmp_path / "assets" / "records" / "weak.jsonl").write_text("2")
    assert notebooks.fingerprint(notebook) != before
    (tmp_path / "assets" / "records" / "weak.jsonl").write_text("1")
    assert notebooks.fingerprint(notebook) == before
    notebook.cells[1].metadata.tags = ["live"]
    assert notebooks.fingerprint(notebook) != before
    notebook.cells[1] = new_code_cell("1 + 2")
    assert notebooks.fingerprint(notebook) != before


@each_notebook
def test_its_first_cell_names_all_that_it_reads(path):
    """Every file of ours that a cell names, or imports, stands in needs(): the hash and the check are made from it."""
    notebook = load(path)
    needed = set(notebooks.needed(notebook))
    sources = "\n".join(cell.source for cell in code(notebook)[1:])
    named = {re.sub(r"^\.\./", "", word) if word.startswith("../") else f"{path.parent.name}/{word}"
             for word in re.findall(r"[\w./]+\.(?:py|jsonl|csv)\b", sources)}
    named |= {f"{folder}/{name}.py" for name in re.findall(r"^(?:import|from) (\w+)", sources, re.M)
              for folder in ("submit", path.parent.name) if (ROOT / folder / f"{name}.py").exists()}
    assert needed and all((ROOT / name).exists() for name in needed)
    assert {name for name in named if (ROOT / name).is_file()} <= needed


def python(cell):
    """A cell's source without IPython's own lines."""
    lines = cell.source.splitlines()
    if lines[0].startswith("%%"):
        return ""
    return "\n".join(line for line in lines if not re.match(r"[%!]|\w+ = !", line))


def prose(notebook):
    """The Markdown cells, and the fixed words of what a code cell displays as Markdown."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield cell.source
        else:
            for call in ast.walk(ast.parse(python(cell))):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Markdown":
                    yield " ".join(str(node.value) for node in ast.walk(call) if isinstance(node, ast.Constant)
                                   and isinstance(node.value, str))


def evidence(notebook):
    """The numbers that code cells compute with, and those that they print."""
    for cell in code(notebook):
        for token in tokenize.generate_tokens(io.StringIO(python(cell)).readline):
            if token.type == tokenize.NUMBER:
                yield token.string.replace("_", "").partition("e")[0]
        for kind, text in said(cell):
            if kind != "text/markdown":
                yield from re.findall(r"\d[\d.]*", re.sub(r"<[^>]*>", " ", text).replace(",", ""))


@each_notebook
def test_numbers_in_its_prose_come_from_its_cells(path):
    """Numbers of two digits or more; not years, nor what stands in code, links or arXiv's numbers."""
    notebook = load(path)
    known = {number.rstrip(".") for number in evidence(notebook)}
    for text in prose(notebook):
        bare = re.sub(r"\]\([^)]*\)|`[^`]*`|\b\d{4}\.\d{5}\b|\b(19|20)\d\d\b|\$[^$]*\$", " ", text).replace(",", "")
        for number in re.findall(r"(?<![\w.-])\d[\d.]*\d(?!\w)", bare):
            assert number in known, f"{number} in: {' '.join(text.split())[:200]}"


def test_what_is_missing_is_one_line_and_the_end():
    notebook = new_notebook(cells=[
        new_code_cell('from tools.pages import ready\nready.needs("assets/records/no.jsonl")'),
        new_code_cell("print('went on')")])
    client = notebooks.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    with pytest.raises(CellExecutionError):
        client.execute()
    output, = notebook.cells[0].outputs
    assert output.traceback == [f"assets/records/no.jsonl is missing; in {ROOT}: git checkout assets/records/no.jsonl"]
    assert not notebook.cells[1].outputs


def test_another_python_is_told_which_to_take():
    done = subprocess.run([os.path.realpath(sys.executable), "-I", "-c",
                           f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + "
                           f"['{ROOT}']; from tools.pages import ready; ready.needs()"], capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"NotReady: matplotlib is missing.*make setup && ", done.stderr), done.stderr


def test_without_mpiexec_it_says_so(monkeypatch, clean_environment, tmp_path):
    monkeypatch.setattr(ready.sys, "executable", str(tmp_path / "python"))
    clean_environment["PATH"] = str(tmp_path)
    with pytest.raises(ready.NotReady, match=r"mpiexec is missing.*make setup"):
        ready.needs()


@pytest.fixture
def lab(tmp_path):
    """The address of a JupyterLab on a copy of the workshop, with nobody's settings."""
    shutil.copytree(ROOT, tmp_path / "workshop", ignore=shutil.ignore_patterns(".*", "data", "results", "tests"))
    settings = tmp_path / "settings"
    settings.mkdir()
    (settings / "jupyter_lab_config.json").write_text(json.dumps({
        "LabApp": {"news_url": None, "check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
                   "expose_app_in_browser": True},
        "ServerApp": {"allow_root": True, "open_browser": False, "port": 0, "root_dir": str(tmp_path / "workshop")}}))
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
             "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")
    log = tmp_path / "lab.log"
    with open(log, "w") as file:
        server = subprocess.Popen([BIN / "jupyter-lab"], stdout=file, stderr=file, cwd=tmp_path,
                                  env=os.environ | dict.fromkeys(names, str(settings)))
    try:
        for _ in range(600):
            found = re.search(r"(http://127\.0\.0\.1:\d+/lab)\?(token=\w+)", log.read_text())
            if found or server.poll() is not None:
                break
            time.sleep(0.1)
        assert found, log.read_text()
        yield lambda path: f"{found[1]}/tree/{path}?{found[2]}"
    finally:
        server.terminate()
        server.wait(20)


STATE = """() => {
    const cells = [...window.jupyterapp.shell.currentWidget.content.model.cells].filter(cell => cell.type === 'code');
    const outputs = cells.flatMap(cell => cell.outputs.toJSON());
    return {waiting: cells.filter(cell => !cell.executionCount || cell.executionState === 'running').length,
            errors: outputs.filter(output => output.output_type === 'error').map(output => output.evalue),
            pictures: outputs.filter(output => output.data && 'image/png' in output.data).length}; }"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium: apt install chromium")
def test_an_instructor_runs_a_notebook_in_jupyterlab(lab, tmp_path):
    """As by hand: open it, clear what is stored, Run All Cells, look."""
    from playwright.sync_api import sync_playwright

    path = "05_zero/memory.ipynb"
    expected = sum(map(pictures, code(load(ROOT / path))))
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60_000)
        page.goto(lab(path))
        page.wait_for_selector(".jp-NotebookPanel .jp-Notebook")
        if page.locator(".jp-Dialog").count():  # Select Kernel
            page.locator(".jp-Dialog .jp-mod-accept").click()
        kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel"
        page.wait_for_function(f"() => {kernel}?.status === 'idle'")
        page.get_by_role("menuitem", name="Edit", exact=True).click()
        page.get_by_role("menuitem", name="Clear Outputs of All Cells").click()
        assert page.evaluate(STATE)["pictures"] == 0
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.wait_for_function(f"() => {{ const now = ({STATE})(); return now.errors.length || !now.waiting; }}",
                               timeout=120_000)
        page.screenshot(path=tmp_path / "lab.png")
        assert page.evaluate(STATE) == {"waiting": 0, "errors": [], "pictures": expected}
        assert page.locator(".jp-RenderedImage img").count() > 0
        browser.close()


def test_the_runner_names_the_cell_that_fails(tmp_path):
    path = tmp_path / "broken.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0")]), path)
    done = execute([sys.executable, "-m", "tools.pages.notebooks", path], cwd=ROOT)
    assert done.code == 1 and "ZeroDivisionError" in done.err and "Traceback" not in done.err.partition("1 / 0")[0]
    done = execute([sys.executable, "-m", "tools.pages.notebooks", tmp_path / "none.ipynb"], cwd=ROOT)
    assert (done.code, done.err) == (1, f"{tmp_path}/none.ipynb: there is no such notebook\n")
