"""Run the notebooks from top to bottom and store their outputs, and a hash of all that these come from.

    python -m tools.pages.notebooks                                   # all
    python -m tools.pages.notebooks 03_ddp/scaling.ipynb

A cell with the tag "live" shows times or figures that another run or machine changes. What any other cell prints
is the same everywhere: tests/test_notebooks.py compares it.
"""

import hashlib
import os
import re
import sys
from pathlib import Path

import nbformat
from launch import ROOT
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from one_line import Parser

SECONDS = 240  # for a cell on a busy machine; a whole notebook takes less than a minute on two idle cores


def notebooks() -> list[Path]:
    return sorted(ROOT.glob("[0-9][0-9]_*/*.ipynb"))


def needed(notebook):
    """The files that the notebook's first code cell names in needs("..."), from the top folder."""
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    return re.findall(r'"([\w/.]+)"', first.source.partition("needs(")[2])


def fingerprint(notebook):
    """SHA-256 of the cells' sources and tags, and of the files that the notebook needs."""
    parts = [f"{cell.cell_type} {cell.metadata.get('tags', [])}\n{cell.source}" for cell in notebook.cells]
    parts += [(ROOT / name).read_text() for name in needed(notebook)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def run(path: Path, **hooks: object) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in its own folder; raises CellExecutionError where a cell fails.

    hooks: nbclient's, as on_cell_executed.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", record_timing=False, coalesce_streams=True,
                   resources={"metadata": {"path": str(path.parent)}}, **hooks).execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
                         "language_info": {"name": "python"}, "workshop": {"sha256": fingerprint(notebook)}}
    return notebook


def main():
    parser = Parser(__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="all, if none is named")
    for path in parser.parse_args().notebooks or notebooks():
        if not os.path.isfile(path) or path.suffix != ".ipynb":
            sys.exit(f"{path}: there is no such notebook")
        print("run:", path, flush=True)
        try:
            nbformat.write(run(path.resolve()), path)
        except (CellExecutionError, CellTimeoutError) as problem:
            sys.exit(f"{path}: {problem}")


if __name__ == "__main__":
    main()
