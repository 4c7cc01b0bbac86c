"""Measure every way to read of reading_data/ on 1, 2 and 4 ranks. Records: read_data.jsonl.

    python -m tools.measuring.reading --folder FOLDER      # on the disk to measure
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import pandas
from matplotlib.figure import Figure

from submit.study import RECORDS, ROOT, start, study
from tools import style

WAYS = ("files", "mpi-io", "mpi-io-default", "readers", "preloaded")
RANKS, REPEATS = (1, 2, 4), 5
CACHES = {"warm": "the file is in memory", "cold": "it comes from the disk"}


def draw(records: pandas.DataFrame) -> Figure:
    """Draw images/s of two ranks, one per core: two points for each way."""
    figure, axis = style.make_figure(4.6)
    speeds = records[records.ranks == 2].groupby("way", sort=False)
    entries = {}
    for cache, shift in ("warm", -0.16), ("cold", 0.16):
        rates = speeds[f"{cache}_images_per_second"]
        middle = rates.median() / 1e6
        bars = [middle - rates.min() / 1e6, rates.max() / 1e6 - middle]
        entries[f"{cache}: {CACHES[cache]}"] = axis.errorbar(
            middle, np.arange(len(middle)) + shift, xerr=bars, fmt="o", capsize=4,
            color=style.CACHE[cache])
    axis.set(xscale="log", yticks=range(len(middle)), yticklabels=middle.index,
             xlabel="million images/s of two ranks together")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.grid(axis="x", color=style.ABSENT)
    axis.invert_yaxis()
    title = f"Reading images: {middle.idxmax()} is fastest, {middle.idxmin()} slowest"
    style.add_title_and_legend(figure, title, entries)
    first = records.iloc[0]
    style.add_footer(
        figure, f"{first['host']}: {first['processor']}, {first['cpus']} cores, and "
        f"its disk; median, least and most of {REPEATS} runs; preloaded once it has read")
    return figure


def measure(folder, way, ranks, repeat):
    return start("reading_data/read_data.py", ranks, "--way", way, "--folder", folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "reading_data" / "data")
    folder = parser.parse_args().folder.resolve()
    plan = [{"way": way, "ranks": ranks, "repeat": repeat}
            for repeat in range(REPEATS) for ranks in RANKS for way in WAYS]
    records = pandas.DataFrame(study(RECORDS / "read_data.jsonl", plan, partial(measure, folder)))
    speeds = [f"{cache}_images_per_second" for cache in CACHES]
    print(records.groupby(["ranks", "way"])[speeds].median().round())
    if (records.groupby("ranks")["checksum"].nunique() > 1).any():
        raise SystemExit("the ways did not deliver the same bytes: see checksum in the records")
    print("\nFor each number of ranks, all ways delivered the same bytes to the same ranks.")


if __name__ == "__main__":
    main()
