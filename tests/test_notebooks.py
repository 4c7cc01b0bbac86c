"""The notebooks run from top to bottom and reproduce their stored outputs."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from conftest import ROOT, tracked_files
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from tools.pages import notebooks

PATHS = tracked_files(notebooks.notebooks())


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell):
    """Return a cell's text outputs without addresses and "Writing" or "Overwriting"."""
    outputs = []
    for output in cell.outputs:
        data = {"stream": output.get("text"), **output.get("data", {})}
        for kind in "stream", "text/plain", "text/html", "text/markdown":
            text = data.get(kind)
            if text and "data:image" not in text:
                outputs.append((kind, re.sub(r"\b0x[0-9a-f]+|(Overw|W)riting", "#", text)))
    return sorted(outputs)


def count_figures(cell):
    """Return the number of figures and frame-by-frame players in a cell's output."""
    data = [output.get("data", {}) for output in cell.outputs]
    return sum("image/png" in part or "data:image/png" in part.get("text/html", "")
               for part in data)


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=pytest.mark.core if path.stem == "cost_model"
                 else pytest.mark.slow) for path in PATHS])
def test_a_rerun_reproduces_the_stored_outputs(path):
    stored_cells = code_cells(nbformat.read(path, as_version=4))
    for stored_cell, cell in zip(stored_cells, code_cells(notebooks.execute(path)), strict=True):
        assert count_figures(cell) == count_figures(stored_cell), cell.source
        if "live" not in cell.metadata.get("tags", []):
            assert texts(cell) == texts(stored_cell), cell.source


@pytest.mark.check
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_stored_outputs_belong_to_the_current_cells(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec == notebooks.KERNEL, "make notebooks"
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert all(cell.execution_count for cell in code_cells(notebook))
    assert not [output for output in outputs if output.output_type == "error"]
    text = str([texts(cell) for cell in code_cells(notebook)])
    assert not re.search(r"/(home|root|work|tmp|Users)/", text)
    fingerprint = notebook.metadata["workshop"]["sha256"]
    assert fingerprint == notebooks.fingerprint(notebook), f"make notebooks ({path.stem})"


def test_a_wrong_kernel_prints_the_command_to_run():
    program = ("import runpy, sys;"
               "sys.path[:] = [path for path in sys.path if 'site-packages' not in path];"
               "runpy.run_path(sys.argv[1], run_name='__main__'); import tools")
    command = [os.path.realpath(sys.executable), "-I", "-c", program,
               ROOT / "tools/notebooks/ready.py"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert re.match(r"No module named matplotlib.*make setup && .*jupyter lab\n", result.stderr)
    assert result.returncode == 1  # so the next cell fails: it cannot import tools


@pytest.mark.parametrize(("name", "has_torchrun"), [
    ("03_ddp/model_vs_data_parallelism", False),
    pytest.param("03_ddp/allreduce", True, marks=pytest.mark.slow),
    pytest.param("03_ddp/allreduce", False, marks=pytest.mark.slow),
    pytest.param("05_zero/memory", False, marks=pytest.mark.slow)])
def test_a_notebook_runs_without_mpi(name, has_torchrun, tmp_path):
    """torchrun starts the ranks; or else cells with a table or a figure show a record instead."""
    path = ROOT / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    figures = [count_figures(cell) for cell in code_cells(notebook)]
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    mpiexec = tmp_path / "mpiexec"
    if has_torchrun:
        mpiexec.symlink_to(ROOT / "tools" / "notebooks" / "without_mpi" / "mpiexec")
    else:
        mpiexec.write_text("#!/bin/sh\necho no MPI on a login node >&2\nexit 1\n")
        mpiexec.chmod(0o755)
    search_path = f"{tmp_path}:/usr/bin:/bin"
    hide_mpiexec = new_code_cell(
        f"import os\nos.environ |= {{'PATH': {search_path!r}, 'SHELL': '/bin/sh'}}")
    notebook.cells.insert(2, hide_mpiexec)  # after the cell that runs ready.py
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, kernel_name="python3", resources=resources).execute()
    notebook.cells.remove(hide_mpiexec)
    assert [count_figures(cell) for cell in code_cells(notebook)] == figures
    if has_torchrun:
        assert "[1] own" in str(notebook) and "all sums: equal" in str(notebook)
