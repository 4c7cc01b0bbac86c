"""Measure reading_data/'s ways of reading on 1, 2 and 4 ranks. Records: read_data.jsonl.

    python -m tools.measuring.reading --folder FOLDER      # on the disk to be measured
"""

from functools import partial
from pathlib import Path

import numpy as np
import pandas
from matplotlib.figure import Figure

from cluster.launch import ROOT
from cluster.records import RECORDS
from cluster.study import run_chapter, run_study
from tools import style
from workshop.flags import Parser

WAYS = ("files", "mpi-io", "mpi-io-default", "readers", "preloaded")
RANKS, REPEATS = (1, 2, 4), 5
CACHES = {"warm": "the file is in memory", "cold": "it comes from the disk"}


def draw(records: pandas.DataFrame) -> Figure:
    """Draw the images/s of two ranks, one per core, with two points for each way of reading."""
    figure, axis = style.make_figure(4.6)
    speeds = records[records.ranks == 2].groupby("way", sort=False)
    entries = {}
    for cache, offset in ("warm", -0.16), ("cold", 0.16):
        rates = speeds[f"{cache}_images_per_second"]
        medians = rates.median() / 1e6
        error_bars = [medians - rates.min() / 1e6, rates.max() / 1e6 - medians]
        entries[f"{cache}: {CACHES[cache]}"] = axis.errorbar(
            medians, np.arange(len(medians)) + offset, xerr=error_bars, fmt="o", capsize=4,
            color=style.CACHE[cache])
    axis.set(xscale="log", yticks=range(len(medians)), yticklabels=medians.index,
             xlabel="million images/s of two ranks together")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.grid(axis="x", color=style.ABSENT)
    axis.invert_yaxis()
    title = f"Reading images: {medians.idxmax()} is fastest, {medians.idxmin()} slowest"
    style.add_title_and_legend(figure, title, entries)
    host = records.iloc[0]
    style.add_footer(
        figure, f"{host['host']}: {host['processor']}, {host['cpus']} cores, and "
        f"its disk; median, least and most of {REPEATS} runs; \"preloaded\" timed after it has "
        "read")
    return figure


def measure(folder, way, ranks, repeat):
    return run_chapter("reading_data/read_data.py", ranks, "--way", way, "--folder", folder)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "reading_data" / "data")
    folder = parser.parse_args().folder.resolve()
    plan = [{"way": way, "ranks": ranks, "repeat": repeat}
            for repeat in range(REPEATS) for ranks in RANKS for way in WAYS]
    records = pandas.DataFrame(
        run_study(RECORDS / "read_data.jsonl", plan, partial(measure, folder)))
    speeds = [f"{cache}_images_per_second" for cache in CACHES]
    print(records.groupby(["ranks", "way"])[speeds].median().round())


if __name__ == "__main__":
    main()
