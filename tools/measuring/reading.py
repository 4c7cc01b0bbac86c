"""The study of reading_data/: every way to read on 1, 2 and 4 ranks; the records go to assets/records/read_data.jsonl.

    python -m tools.measuring.reading
"""

from pathlib import Path

import numpy as np
import pandas
from launch import ROOT, launch
from matplotlib.figure import Figure
from one_line import Parser
from records import RECORDS
from runs import study

from tools import style

WAYS = ("files", "mpi-io", "mpi-io-default", "mpi-io-alone", "readers", "preloaded")
RANKS, REPEATS = (1, 2, 4), 5


def table(records):
    """Median (least..most) of the runs of every way on every number of ranks, as text; records: a DataFrame."""
    groups, first = records.groupby(["way", "ranks"], sort=False), records.iloc[0]
    columns = {f"images/s {cache}": groups[f"{cache}_images_per_second"].agg(
        lambda runs: f"{runs.median():,.0f} ({runs.min():,.0f}..{runs.max():,.0f})") for cache in ("warm", "cold")}
    for title, name, unit in (("ready [ms]", "ready_seconds", 1e-3), ("read [MB]", "read_bytes", 1e6),
                              ("disk [MB]", "disk_bytes", 1e6)):
        columns[title] = (groups[f"cold_{name}"].median() / unit).map("{:,.0f}".format)
    rows = groups.size().to_frame().assign(**columns).drop(columns=0).reset_index()
    return (f"{first['images']:,} images of {first['image_bytes']:,} bytes, {first['batch_size']} a step on each rank; "
            f"{first['host']}, {first['cpus']} cores\nimages/s of all ranks together, median (least..most) of "
            f"{groups.size().iloc[0]} runs; ready, read, disk: median, cold\n\n" + rows.to_string(index=False))


def draw(records: pandas.DataFrame) -> Figure:
    """A figure of the same: a panel for each number of ranks, two points for each way."""
    figure, axes = style.picture(4.6, 1, len(RANKS), sharex=True, sharey=True)
    entries, firsts, lasts = {}, [], []
    places = {"warm": "the file is in memory", "cold": "it comes from the disk"}
    for axis, (ranks, of_ranks) in zip(axes, records.groupby("ranks")):
        for cache, shift in ("warm", -0.16), ("cold", 0.16):
            runs = of_ranks.groupby("way", sort=False)[f"{cache}_images_per_second"]
            middle = runs.median() / 1e6
            bars = [middle - runs.min() / 1e6, runs.max() / 1e6 - middle]
            entries[f"{cache}: {places[cache]}"] = axis.errorbar(
                middle, np.arange(len(middle)) + shift, xerr=bars, fmt="o", capsize=4, color=style.CACHE[cache])
            firsts.append(middle.idxmax())
            lasts.append(middle.idxmin())
        axis.set(title=f"{ranks} rank{'s' * (ranks > 1)}", xscale="log", yticks=range(len(middle)),
                 yticklabels=middle.index)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.grid(axis="x", color=style.ABSENT)
    axis.invert_yaxis()
    axes[len(axes) // 2].set_xlabel("million images/s of all ranks together")
    style.head(figure, f"Reading images: {' or '.join(dict.fromkeys(firsts))} is fastest, "
               f"{' or '.join(dict.fromkeys(lasts))} slowest", entries)
    style.foot(figure, f"{records['host'].iloc[0]}: {records['processor'].iloc[0]}, {records['cpus'].iloc[0]} cores, "
               f"and its disk; median, least and most of {REPEATS} runs; preloaded once it has read")
    return figure


def measure(way, ranks, repeat, folder):
    return launch("reading_data/read_data.py", ranks, "--way", way, "--folder", folder)


def check(records):
    """Raise RuntimeError where two ways delivered other bytes on as many ranks."""
    found = pandas.DataFrame(records)
    if (found.groupby("ranks")["checksum"].nunique() > 1).any():
        raise RuntimeError(f"the ways did not deliver the same bytes:\n{found[['way', 'ranks', 'checksum']]}")


def main():
    parser = Parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "reading_data" / "data", help="on the disk to measure")
    folder = str(parser.parse_args().folder.resolve())
    plan = [{"way": way, "ranks": ranks, "repeat": repeat, "folder": folder}
            for repeat in range(REPEATS) for ranks in RANKS for way in WAYS]
    records = pandas.DataFrame(study(RECORDS / "read_data.jsonl", plan, measure, check))
    print(f"{table(records)}\n\nOn each number of ranks all ways delivered the same bytes to the same ranks.")


if __name__ == "__main__":
    main()
