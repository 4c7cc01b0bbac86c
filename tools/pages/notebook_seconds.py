"""How long the notebooks take, alone and beside busy cores. Records: assets/records/notebook_seconds.jsonl.

    python -m tools.pages.notebook_seconds

Each notebook is run from top to bottom; beside it a process for each core computes, or none does.
"""

import multiprocessing
import time

import pandas
from launch import ROOT, machine
from records import RECORDS
from runs import study

from tools.pages import notebooks


def busy():
    while True:
        pass


def measure(notebook, beside):
    """Seconds of the notebook with its kernel's start, and of the cell that took longest, with its first line."""
    found = machine()
    others = [multiprocessing.Process(target=busy, daemon=True)
              for _ in range(found["cpus"] if beside == "all cores busy" else 0)]
    begun, cells = {}, []

    def begins(cell, cell_index):
        begun[cell_index] = time.monotonic()

    def ends(cell, cell_index, **_):
        cells.append((time.monotonic() - begun[cell_index], cell.source.splitlines()[0]))

    for other in others:
        other.start()
    started = time.monotonic()
    try:
        notebooks.run(ROOT / notebook, on_cell_execute=begins, on_cell_executed=ends)
    finally:
        for other in others:
            other.kill()
            other.join()
    seconds, line = max(cells)
    return found | {"notebook": notebook, "beside": beside, "total_seconds": time.monotonic() - started,
                    "longest_seconds": seconds, "longest": line}


def table(records: pandas.DataFrame) -> str:
    """A row a notebook: seconds in all, and of its longest cell, by what runs beside it."""
    first, columns = records.iloc[0], {}
    for beside, in_all, of_one in (("nothing", "alone [s]", "one cell [s]"),
                                   ("all cores busy", "all cores busy [s]", "one cell")):
        rows = records[records["beside"] == beside].set_index("notebook")
        columns |= {in_all: rows["total_seconds"].map("{:.0f}".format),
                    of_one: rows["longest_seconds"].map("{:.0f}".format)}
    return (f"{first['processor']}, {first['cpus']} cores; seconds from top to bottom, and of the cell that takes "
            f"longest\n\n{pandas.DataFrame(columns).rename_axis('').to_string()}")


if __name__ == "__main__":
    print(table(pandas.DataFrame(study(RECORDS / "notebook_seconds.jsonl", [
        {"notebook": str(path.relative_to(ROOT)), "beside": beside}
        for path in notebooks.notebooks() for beside in ("nothing", "all cores busy")], measure))))
