"""The notebooks: they run from top to bottom, say the same again, and were stored with what they need as it is now."""

import ast
import io
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tokenize
from itertools import pairwise

import nbformat
import pytest
import screens
from conftest import ROOT, execute
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from tools.measuring.cpus import SETTINGS
from tools.pages import notebooks, ready, slides

PATHS = notebooks.notebooks()
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
in_a_browser = pytest.mark.skipif(not shutil.which("chromium"), reason="no Chromium: apt install chromium")
IMAGES = "() => [...document.querySelectorAll('.jp-OutputArea-output img')].map(image => image.src)"
LINES = 6  # of a code cell that the audience sees


def load(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(cell):
    """What a cell has put out, but for pictures and for names that a run makes up."""
    texts = []
    for output in cell.outputs:
        for kind, text in {"stream": output.get("text"), **output.get("data", {})}.items():
            if text and kind in ("stream", "text/plain", "text/html", "text/markdown") and "data:image" not in text:
                texts.append((kind, re.sub(r"T_[0-9a-f]{5}|\b0x[0-9a-f]+", "#", text)))
    return sorted(texts)


def pictures(cell):
    """Figures, and what is turned like pages."""
    return sum("image/png" in data or "data:image/png" in data.get("text/html", "")
               for data in (output.get("data", {}) for output in cell.outputs))


def test_the_six_are_there():
    assert {path.stem for path in PATHS} == {
        "batch_size", "allreduce", "model_vs_data_parallelism", "scaling", "cost_model", "memory"}


def busy():
    while True:
        pass


@pytest.mark.parametrize("setting", ["as it is", "SSE4.1, a busy core"])
@each_notebook
def test_it_runs_and_says_what_is_stored(path, setting, monkeypatch):
    """Elsewhere, too: what a cell says of records stays, and no assertion fails of what it measures."""
    for name, value in SETTINGS[setting.partition(",")[0]].items():
        monkeypatch.setenv(name, value)
    other = multiprocessing.get_context("fork").Process(target=busy, daemon=True)
    if "busy" in setting and "PYTEST_XDIST_WORKER" not in os.environ:  # else the tests beside it are
        other.start()
    try:
        compare(load(path), notebooks.run(path))
    finally:
        if other.pid:
            other.kill()
            other.join()


@each_notebook
def test_cells_may_be_skipped(path):
    """Behind the imports, the cells run from the last to the first: none needs what an earlier one has made."""
    notebook = load(path)
    last = max(number for number, cell in enumerate(notebook.cells)
               if re.search("^from tools.notebooks", cell.source, re.M))
    notebook.cells[last + 1:] = reversed(notebook.cells[last + 1:])
    notebooks.NotebookClient(notebook, timeout=notebooks.SECONDS, kernel_name="python3",
                             resources={"metadata": {"path": str(path.parent)}}).execute()


def compare(stored, again):
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
    named |= imported(sources)
    for module in imported(sources):
        named |= imported((ROOT / module).read_text()) | set(
            re.findall(r"assets/records/[\w.]+\.(?:jsonl|csv)", (ROOT / module).read_text()))
    assert needed and all((ROOT / name).exists() for name in needed)
    assert {name for name in named if (ROOT / name).is_file()} <= needed


def imported(source):
    """The files of tools/ whose functions a source uses."""
    tree = ast.parse("\n".join(re.findall(r"^from tools\..*?\([^)]*\)|^from tools\..*", source, re.M)))
    names = {f"{each.module}.{name.name}": each.module for each in tree.body for name in each.names}
    paths = {f"{name.replace('.', '/')}.py" for pair in names.items() for name in pair}
    return {path for path in paths if (ROOT / path).is_file()} - {"tools/pages/ready.py"}


def story(notebook):
    """The cells above the last heading, which is folded with all that is for reading."""
    folded = [number for number, cell in enumerate(notebook.cells) if cell.metadata.get("jp-MarkdownHeadingCollapsed")]
    assert len(folded) == 1 and notebook.cells[folded[0]].source.startswith("## ")
    assert not [cell for cell in notebook.cells[folded[0] + 1:] if re.match(r"##? ", cell.source)
                and cell.cell_type == "markdown"], "a heading of its rank ends what is folded"
    return notebook.cells[:folded[0]]


@each_notebook
def test_what_the_audience_sees_of_the_code_is_short(path):
    """The rest is folded, and its first line says what it does."""
    for cell in story(load(path)):
        if cell.cell_type != "code":
            continue
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            assert re.match(r"#|%%", cell.source), cell.source
        else:
            assert len([line for line in cell.source.splitlines() if line.strip()]) <= LINES, cell.source


@each_notebook
def test_the_audience_predicts(path):
    cells = story(load(path))
    asked = [after for cell, after in pairwise(cells) if cell.source.startswith("**Predict.**")]
    assert len(asked) >= 2 and all(cell.cell_type == "code" and cell.outputs for cell in asked)


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
        bare = re.sub(r"<[^>]*>|\]\([^)]*\)|`[^`]*`|\b\d{4}\.\d{5}\b|\b(19|20)\d\d\b|\$[^$]*\$", " ", text)
        for number in re.findall(r"(?<![\w.-])\d[\d.]*\d(?!\w)", bare.replace(",", "")):
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


@in_a_browser
@each_notebook
def test_an_instructor_runs_a_notebook_in_jupyterlab(path, tmp_path):
    """As by hand: open it, clear what is stored, Run All Cells, look, at both zooms."""
    expected = sum(map(pictures, code(load(path))))
    with screens.jupyterlab(tmp_path) as address, screens.chromium() as browser:
        page = screens.opened(browser, address.format(path.relative_to(ROOT)))
        assert not screens.run_all(page)
        assert page.locator(".jp-OutputArea-output img").count() == expected
        assert within(screens.measured(page)) == []
        for control, move in ((".noUi-handle", slide),
                              (".jp-OutputArea-output button[value='1']", lambda found: found.click())):
            if page.locator(control).count():
                before = page.evaluate(IMAGES)
                move(page.locator(control).first)
                page.wait_for_function(f"before => String(({IMAGES})()) !== String(before)", arg=before)
                assert len(page.evaluate(IMAGES)) == len(before)


def slide(handle):
    """Move a slider by one step."""
    at_its_end = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
    handle.press("ArrowLeft" if at_its_end else "ArrowRight")


def within(found):
    """What is wrong with what screens.py has measured."""
    return [name for name, wrong in {
        f"{found['screens']} screens": found["screens"] > screens.MOST,
        f"{found['gap']} screens without a figure": found["gap"] > screens.GAP,
        f"text of {found['text']} pixels": found["text"] < screens.LEAST,
        **{f"{text}: {height} screens with its figure": height > 1 for height, text in found["with heading"]}}.items()
        if wrong]


@in_a_browser
def test_the_last_row_can_read_it(tmp_path):
    """As stored: screens, the way to each figure, text at both zooms; sliders that have no kernel yet do not matter."""
    wrong = {}
    with screens.jupyterlab(tmp_path) as address, screens.chromium() as browser:
        for path in PATHS:
            page = screens.opened(browser, address.format(path.relative_to(ROOT)))
            wrong[path.stem] = within(screens.measured(page))
            screens.zoom(page, 1.5)
            wrong[path.stem] += [name for name in within(screens.measured(page, 1.5)) if "pixels" in name]
            page.close()
    assert not any(wrong.values()), wrong


def test_what_is_too_long_or_too_small_is_seen():
    assert within({"screens": 9, "gap": 1.5, "text": 18, "with heading": [(1, "a")]}) == []
    assert len(within({"screens": 9.1, "gap": 1.6, "text": 17.9, "with heading": [(1.1, "a"), (1, "b")]})) == 4


def test_plan_b_has_two_slides_of_each_notebook(tmp_path):
    slides.main(tmp_path / "slides.html")
    text = (tmp_path / "slides.html").read_text()
    assert text.count("<section>") == 2 * len(PATHS) == text.count('src="data:image/png;base64,')
    assert not re.findall(r'(?:src|href)="(?!data:)', text) and "**" not in text
    for section in text.split("<section>")[1:]:
        assert re.search(r"<h1>[^<]+", section) and re.search(r"<p>.{20,}</p>", section, re.S)


def test_the_runner_names_the_cell_that_fails(tmp_path):
    path = tmp_path / "broken.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0")]), path)
    done = execute([sys.executable, "-m", "tools.pages.notebooks", path], cwd=ROOT)
    assert done.code == 1 and "ZeroDivisionError" in done.err and "Traceback" not in done.err.partition("1 / 0")[0]
    done = execute([sys.executable, "-m", "tools.pages.notebooks", tmp_path / "none.ipynb"], cwd=ROOT)
    assert (done.code, done.err) == (1, f"{tmp_path}/none.ipynb: there is no such notebook\n")
