"""How long the notebooks take, alone and beside busy cores. Records: assets/records/notebook_seconds.jsonl.

    python -m tools.measuring.notebook_seconds

Each notebook is run from top to bottom; beside it a process for each core computes, or none does.
"""

import multiprocessing
import sys
import time

import pandas
from launch import ROOT, machine
from records import refusal
from runs import study

from tools.pages import notebooks

BESIDE, REPEATS = ("nothing", "all cores busy"), 1
RECORDS = ROOT / "assets" / "records" / "notebook_seconds.jsonl"


def busy():
    while True:
        pass


def measure(repeat, notebook, beside):
    """Seconds of the notebook with its kernel's start, and of the cell that took longest, with its first line."""
    found = machine()
    others = [multiprocessing.Process(target=busy, daemon=True)
              for _ in range(found["cpus"] if beside == "all cores busy" else 0)]
    cells = {}

    def begins(cell, cell_index):
        cells[cell_index] = time.monotonic(), cell.source.splitlines()[0]

    def ends(cell, cell_index, **_):
        begun, line = cells[cell_index]
        cells[cell_index] = time.monotonic() - begun, line
    for other in others:
        other.start()
    begun = time.monotonic()
    try:
        notebooks.run(ROOT / notebook, on_cell_execute=begins, on_cell_executed=ends)
    finally:
        for other in others:
            other.kill()
            other.join()
    seconds, line = max(cells.values())
    return found | {"notebook": notebook, "beside": beside, "repeat": repeat, "total_seconds": time.monotonic() - begun,
                    "longest_seconds": seconds, "longest": line}


def table(records: pandas.DataFrame) -> str:
    """A row a notebook: seconds in all, and of its longest cell, by what runs beside it: least to most."""
    def span(values):
        least, most = round(values.min()), round(values.max())
        return f"{least}" if least == most else f"{least} to {most}"

    first, columns = records.iloc[0], {}
    for beside in BESIDE:
        groups = records[records["beside"] == beside].groupby("notebook", sort=False)
        name = {"nothing": "alone"}.get(beside, beside)
        columns[f"{name} [s]"] = groups["total_seconds"].agg(span)
        columns["one cell [s]" if beside == "nothing" else "one cell"] = groups["longest_seconds"].agg(span)
    return (f"{first['processor']}, {first['cpus']} cores; seconds from top to bottom, and of the cell that takes "
            f"longest\n\n{pandas.DataFrame(columns).rename_axis('').to_string()}")


def main():
    if reason := refusal(RECORDS):
        sys.exit(f"notebook_seconds.py: {reason}")
    plan = [{"repeat": repeat, "notebook": str(path.relative_to(ROOT)), "beside": beside}
            for repeat in range(REPEATS) for path in notebooks.notebooks() for beside in BESIDE]
    print(table(pandas.DataFrame(study(RECORDS, plan, measure))))


if __name__ == "__main__":
    main()
