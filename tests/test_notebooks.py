"""The notebooks: they run from top to bottom, say the same again, and were stored with what they need as it is now."""

import json
import os
import re
import subprocess
import sys

import nbformat
import pytest
from conftest import ROOT, execute, tracked
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from tools.measuring.cpus import SETTINGS
from tools.notebooks import ready, recorded_ranks
from tools.pages import notebooks

PATHS = tracked(notebooks.notebooks())
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def quick(stem):
    """A case for each notebook; all but this one take long."""
    return pytest.mark.parametrize("path", [
        pytest.param(path, id=path.stem, marks=pytest.mark.core if path.stem == stem else pytest.mark.slow)
        for path in PATHS])


def load(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(cell):
    """What a cell has put out, but for pictures, made-up names, and whether %%writefile met an older file."""
    texts = []
    for output in cell.outputs:
        for kind, text in {"stream": output.get("text"), **output.get("data", {})}.items():
            if text and kind in ("stream", "text/plain", "text/html", "text/markdown") and "data:image" not in text:
                texts.append((kind, re.sub(r"T_[0-9a-f]{5}|\b0x[0-9a-f]+|(Overw|W)riting", "#", text)))
    return sorted(texts)


def pictures(cell):
    """Figures, and what is turned like pages."""
    return sum("image/png" in data or "data:image/png" in data.get("text/html", "")
               for data in (output.get("data", {}) for output in cell.outputs))


def compare(stored, again):
    """But for cells that are live, what is said is the same."""
    assert len(code(stored)) == len(code(again))
    for old, new in zip(code(stored), code(again)):
        assert pictures(new) == pictures(old), new.source
        if "live" not in new.metadata.get("tags", []):
            assert said(new) == said(old), new.source


@quick("cost_model")
def test_it_runs_and_says_what_is_stored(path):
    compare(load(path), notebooks.run(path))


@pytest.fixture
def poor_machine(tmp_path, monkeypatch):
    """One core, of another CPU; no Horovod, and no namespaces, without which there is no lab."""
    (tmp_path / "horovod.py").write_text("raise ImportError('no Horovod here')")
    (tmp_path / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name, value in SETTINGS["SSE4.1"].items():
        monkeypatch.setenv(name, value)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux confines a process to a core")
@quick("scaling")
def test_it_runs_on_a_poor_machine(path, poor_machine):
    compare(load(path), notebooks.run(path))


@pytest.mark.check
@each_notebook
def test_it_was_stored_with_the_code_and_records_that_are_here(path):
    notebook = load(path)
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert all(cell.execution_count for cell in code(notebook))
    assert not [output for output in outputs if output.output_type == "error"]
    assert not re.search(r"/(home|root|work|tmp|Users)/", str([said(cell) for cell in code(notebook)]))
    assert notebook.metadata["workshop"]["sha256"] == notebooks.fingerprint(notebook), f"make notebooks ({path.stem})"


def test_what_is_missing_is_one_line_and_the_end():
    notebook = new_notebook(cells=[
        new_code_cell('from tools.notebooks import ready\nready.needs("assets/records/no.jsonl")'),
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
                           f"['{ROOT}']; from tools.notebooks import ready; ready.needs()"], capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"NotReady: matplotlib is missing.*make setup && ", done.stderr), done.stderr


@pytest.mark.slow
def test_batch_size_trains_as_main_py_does(tmp_path):
    """After the first epoch, in separate processes: both have a main.py to import."""
    flags = ["--device", "cpu", "--epochs", "1", "--seed", "3", "--results", str(tmp_path / "record")]
    done = execute([sys.executable, "main.py", *flags], env={"OMP_NUM_THREADS": "1"}, cwd=ROOT / "01_single_node")
    assert done.code == 0, done.err
    program = ("from tools.measuring.steps_to_target import training; "
               "print(next(accuracy for step, loss, accuracy in training(64, rate=0.05, seed=3) if step == 22))")
    found = execute([sys.executable, "-c", program], env={"OMP_NUM_THREADS": "1"}, cwd=ROOT)
    assert found.code == 0, found.err
    assert float(found.out) == json.loads((tmp_path / "record").read_text())["test_accuracy"]


@pytest.mark.check
def test_without_an_mpiexec_the_commands_of_the_notebooks_show_their_record(tmp_path):
    """All of them, with the lines of their results file; another command is told that there is none."""
    commands = {match for path in PATHS for cell in code(load(path))
                for match in re.findall(r"mpiexec ((?:-l )?-n \d+ python [^|\"{\n]*[^|\"{\s])", cell.source)}
    assert len(commands) == len(recorded_ranks.COMMANDS)
    for words in (words for _, words in recorded_ranks.COMMANDS):
        assert any(words.startswith(command) for command in commands), words
        results = [] if "average" in words or "ring" in words else ["--results", tmp_path / "results"]
        done = execute([sys.executable, recorded_ranks.__file__, *words.split(), *results])
        assert done.code == 0 and done.out.startswith("There is no mpiexec here. Recorded on "), done
        assert not results or json.loads((tmp_path / "results").read_text().splitlines()[0])
    assert execute([sys.executable, recorded_ranks.__file__, "-n", 2, "hostname"]).code == 1


def test_needs_finds_the_stand_in(monkeypatch):
    monkeypatch.setattr(ready.shutil, "which", lambda _: None)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ready.needs()
    assert execute(["mpiexec", "-n", 2, "python", "three_ways.py"], env={"PATH": os.environ["PATH"]}).code == 0
