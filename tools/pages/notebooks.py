"""Run the notebooks from top to bottom, and store their outputs and a hash of their cells.

    python -m tools.pages.notebooks                                   # all
    python -m tools.pages.notebooks 03_ddp/scaling.ipynb

A cell with the tag "live" shows times or figures that differ between runs. The output of any other
cell is the same everywhere: tests/test_notebooks.py compares it.
"""

import base64
import hashlib
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from cluster.launch import ROOT
from tools.style import reduce_colors
from workshop.flags import Parser

# As JupyterLab writes it, so that a notebook that is only opened stays unchanged
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
REPOSITORY = re.compile(  # a fork has another name
    r"(git clone [-\w ]*https://github\.com/|colab\.research\.google\.com/github/)[\w.-]+/[\w.-]+")
SECONDS = 240  # per cell, on a busy machine; a notebook takes a minute or two on two idle cores


def notebooks() -> list[Path]:
    return sorted(ROOT.glob("[0-9][0-9]_*/*.ipynb"))


def fingerprint(notebook: nbformat.NotebookNode) -> str:
    """Return the SHA-256 of the cells' sources and tags, without the repository's name."""
    parts = [f"{cell.cell_type} {cell.metadata.get('tags', [])}\n{cell.source}"
             for cell in notebook.cells]
    text = REPOSITORY.sub(r"\1", "\0".join(parts))
    return hashlib.sha256(text.encode()).hexdigest()


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with the outputs of a run in its folder. Raises CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", record_timing=False,
        coalesce_streams=True, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    notebook.metadata = {
        "kernelspec": KERNEL, "language_info": notebook.metadata.language_info,
        "workshop": {"sha256": fingerprint(notebook)}}
    return notebook


def shrink(notebook: nbformat.NotebookNode) -> None:
    """Reduce the colours of all figures."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                png = reduce_colors(base64.b64decode(data["image/png"]))
                data["image/png"] = base64.b64encode(png).decode()


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all")
    for path in parser.parse_args().notebooks or notebooks():
        print("run:", path, flush=True)
        try:
            notebook = execute(path.resolve())
        except (CellExecutionError, CellTimeoutError) as error:
            sys.exit(f"{path}: {error}")
        shrink(notebook)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
