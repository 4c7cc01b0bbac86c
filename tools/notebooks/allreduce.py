"""What 02_horovod/allreduce.ipynb draws, and the records that it reads. What it computes stands in its cells.

S is the size of a tensor in bytes, N the number of ranks. `seconds` is the notebook's formula of the time that an
all-reduce takes: seconds(way, N, S, alpha, beta), alpha in seconds a step, beta in seconds a byte.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle
from records import ROOT, published

from tools.style import ABSENT, COMMUNICATION, IDEAL, MEASURED, RANKS, TITLE, WAYS, WIDTH, Picture, picture

OURS = "everyone_to_everyone", "reduce_and_broadcast", "ring"
COLORS = *RANKS, "#F0E442", "#0072B2", "#D55E00", "#999999"  # of more than four ranks; Okabe and Ito's, too
KB, MB = 2**10, 2**20
BUCKETS = {"DDP's\nbucket\n25 MB": 25 * MB, "Horovod's\nbuffer\n128 MB": 128 * MB}  # Horovod's since 0.21


def named(way: str) -> str:
    return way.replace("_", " ")


def recorded() -> pd.DataFrame:
    """The measurements of assets/records/allreduce.jsonl, a row each."""
    return pd.DataFrame(published("allreduce.jsonl"))


def measured_here(ranks: int = 2, repeats: int = 5) -> pd.DataFrame:
    """The same of a run of ring_allreduce.py here and now, 4 kB to 16 MB; empty where it cannot start its ranks."""
    sizes = [str(4 * KB * 4**power) for power in range(7)]
    words = ["mpiexec", "-n", str(ranks), "python", "pytorch/ring_allreduce.py", "--repeats", str(repeats), "--sizes", *sizes]
    print("runs:", *words)
    with TemporaryDirectory() as folder:
        results = Path(folder, "results")
        done = subprocess.run([*words, "--results", results], cwd=ROOT / "02_horovod", capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=110)
        if done.returncode:
            print(f"no ranks start here, so there are the records alone: {(done.stderr or done.stdout).strip()[-300:]}")
            return pd.DataFrame()
        return pd.read_json(results, lines=True)


def medians(records: pd.DataFrame) -> pd.DataFrame:
    """A row a way, number of ranks and size: the median of the runs' medians, and least and most of all repeats."""
    groups = records.groupby(["algorithm", "ranks", "bytes"], as_index=False)
    return groups.agg({"seconds": "median", "least": "min", "most": "max", "bytes_sent": "first"})


def fitted(seconds: Callable, rows: pd.DataFrame) -> tuple[float, float]:
    """The alpha and beta with which the formula comes closest to these rows: least squares of the relative errors."""
    terms = [[seconds(row.algorithm, row.ranks, row.bytes, *unit) / row.seconds for unit in ((1, 0), (0, 1))]
             for row in rows.itertuples()]
    return tuple(np.linalg.lstsq(np.array(terms), np.ones(len(terms)))[0])


def canvas(height: float) -> tuple[Picture, Axes]:
    """A picture whose one axis is a sheet of paper in inches."""
    figure, axis = picture(height)
    figure.get_layout_engine().set(w_pad=0, h_pad=0)
    axis.set_axis_off()
    axis.set(xlim=(0, WIDTH), ylim=(0, height), aspect="equal")
    return figure, axis


def arrow(axis: Axes, start: tuple, end: tuple, **look: object) -> None:
    axis.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=22, lw=2.5, color=COMMUNICATION,
                                   **{"shrinkA": 0, "shrinkB": 0} | look))


def circle(ranks: int = 4) -> Picture:
    """The ranks on a circle, each with an arrow to the next, and the two rounds of the ring."""
    figure, axis = canvas(3.6)
    angles = np.pi / 2 - 2 * np.pi * np.arange(ranks + 1) / ranks  # clockwise from the top
    places = np.stack([1.95 + 1.3 * np.cos(angles), 1.8 + 1.3 * np.sin(angles)], axis=1)
    for rank in range(ranks):
        axis.add_patch(Circle(places[rank], 0.42, color=COLORS[rank], lw=0))
        axis.text(*places[rank], f"rank {rank}", ha="center", va="center")
        arrow(axis, places[rank], places[rank + 1], shrinkA=33, shrinkB=33,
              connectionstyle=f"arc3,rad={-np.tan(np.pi / 2 / ranks)}")
    axis.text(1.95, 1.8, f"S / {ranks}\na step", ha="center", va="center")
    axis.text(4.0, 1.8, f"The S bytes are cut into {ranks} chunks. In each step\n"
              "a rank sends one of them to the next rank.\n\n"
              f"First round, {ranks - 1} steps: reduce-scatter\nThe next rank adds the chunk to its own.\n"
              "Then each rank has the sum of one chunk.\n\n"
              f"Second round, {ranks - 1} steps: all-gather\nEach sum goes once around.", va="center", linespacing=1.35)
    return figure


def ring_frame(held: np.ndarray, sent: list | None, title: str, foot: str) -> Picture:
    """held[rank][chunk], digit by digit: the digit of rank r stands in r's colour; a frame and an arrow for sent[rank],
    the chunk that the rank sends."""
    figure, axis = canvas(4.0)
    count, left, gap = len(held), 1.32, 0.44
    slot, height = (WIDTH - left) / count, 2.56 / count
    axis.text(0.05, 3.78, title, size=TITLE, va="center", weight="bold")
    axis.text(0.05, 0.2, foot, va="center")
    for rank, numbers in enumerate(held):
        x, width = left + rank * slot, slot - gap
        axis.text(x + width / 2, 3.3, f"rank {rank}", ha="center", va="center")
        for chunk, number in enumerate(numbers):
            digits = f"{number:0{count}}"
            y, part = 3.05 - (chunk + 1) * height, width / len(digits)
            for place, digit in enumerate(digits):
                color = ABSENT if digit == "0" else COLORS[len(digits) - 1 - place]
                axis.add_patch(Rectangle((x + place * part, y), part, height - 0.08, fc=color, ec="white"))
                axis.text(x + (place + 0.5) * part, y + height / 2 - 0.04, digit, ha="center", va="center")
            if rank == 0:
                axis.text(0.05, y + height / 2 - 0.04, f"chunk {chunk}", va="center")
            if sent and sent[rank] == chunk:
                axis.add_patch(Rectangle((x, y), width, height - 0.08, fill=False, ec=MEASURED, lw=4))
                for start in [x + width] if rank < count - 1 else [x + width, left - gap]:  # the last sends to rank 0
                    arrow(axis, (start + 0.04, y + height / 2), (start + gap - 0.04, y + height / 2))
    return figure


def ring_frames(held: list[np.ndarray], sent: list[list]) -> list[Picture]:
    """A frame before each step, and one at the end. Numbers held[step][rank][chunk]; chunks sent[step][rank]."""
    count, frames = len(held[0]), []
    for step, chunks in enumerate(sent):
        says = "reduce-scatter: the next rank adds" if step < count - 1 else "all-gather: the next rank keeps"
        frames.append(ring_frame(held[step], chunks, f"step {step + 1} of {len(sent)}, {says} what it gets",
                                 f"Frame: the rank sends this chunk, S/{count}.   "
                                 f"Sent so far, by each rank: {step / count:g} S"))
    return [*frames, ring_frame(held[-1], None, f"after step {len(sent)}",
                                f"Sent by each rank: {len(sent) / count:g} S")]


def against_size(axis: Axes, names: dict[str, float], label: str) -> None:
    """Two logarithmic axes: across the size, with these sizes named, and upwards what the label says."""
    axis.set(xscale="log", yscale="log", xlabel="S, the size of the tensor", ylabel=label)
    axis.set_xticks(list(names.values()), list(names))
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")  # an exponent would be too small to read


def bytes_figure(records: pd.DataFrame, sent: Callable, most: int = 12) -> Picture:
    """What the rank that sends most sends, in units of S: the formula sent(way, N) as lines, counts as points."""
    figure, axis = picture(3.8)
    ranks = np.arange(2, most + 1)
    for way, style in zip(OURS, ("-", "--", "-")):
        axis.plot(ranks, [sent(way, N) for N in ranks], style, color=WAYS[way], lw=4, label=named(way))
        rows = records[records.algorithm == way]
        counted, = axis.plot(rows.ranks, rows.bytes_sent.map(max) / rows.bytes, "o", color=MEASURED)
    counted.set_label("counted on real ranks, in the records")
    axis.axhline(2, color=IDEAL, ls=":", label="2 S")
    axis.set(xlabel="N, the number of ranks", ylabel="the busiest rank sends, in S", ylim=0, xticks=ranks)
    axis.legend(loc="upper left")
    return figure


def bandwidth_figure(records: pd.DataFrame, here: pd.DataFrame) -> Picture:
    """Bytes a second of two ranks against size: in the records, and in a run of now, if there is one."""
    shown = {"in the records": records, "here and now": here} if len(here) else {"in the records": records}
    figure, axes = picture(4.0, columns=len(shown), sharey=True, squeeze=False)
    for axis, (title, runs) in zip(axes[0], shown.items()):
        times = runs[runs.ranks == 2].groupby(["algorithm", "bytes"]).seconds.median()
        for way, name in ("mpi", "MPI"), ("gloo", "gloo"), ("ring", "ring"):
            axis.plot(times[way].index, times[way].index / times[way] / 1e9, "o-", color=WAYS[way], label=name)
        against_size(axis, {"4 kB": 4 * KB, "256 kB": 256 * KB, "16 MB": 16 * MB}, "")
        axis.set_xlim(4 * KB / 1.5, 1.5 * 64 * MB)
        axis.set_title(f"{title}: 2 ranks, {runs.cpus.iloc[0]} cores")
    axes[0, 0].set_ylabel("S / time, GB/s")
    axes[0, 0].legend()
    return figure


def time_figure(seconds: Callable, rows: pd.DataFrame, ranks: int) -> Picture:
    """Milliseconds against size, with the spread of all repeats: points. Lines: the formula, fitted to each way."""
    figure, axis = picture(4.3, title=f"{ranks} ranks on 2 cores. Points: the records; lines: fitted")
    for place, way in enumerate(OURS):
        found = rows[(rows.ranks == ranks) & (rows.algorithm == way)]
        alpha, beta = fitted(seconds, found)
        beside = found.bytes * 1.12 ** (place - 1)  # so that no line hides another
        axis.vlines(beside, 1000 * found.least, 1000 * found.most, color=WAYS[way], alpha=0.35, lw=3)
        axis.plot(beside, 1000 * found.seconds, "o", color=WAYS[way])
        between = np.geomspace(found.bytes.min(), found.bytes.max())
        axis.plot(between, 1000 * seconds(way, ranks, between, alpha, beta), color=WAYS[way],
                  label=f"{named(way)}\n{1e6 * alpha:.0f} µs a step, {1e-9 / beta:.1f} GB/s")
    against_size(axis, {"4 kB": 4 * KB, "64 kB": 64 * KB, "1 MB": MB, "16 MB": 16 * MB}, "milliseconds")
    figure.legend(loc="outside right upper", labelspacing=1)
    return figure


def network_figure(seconds: Callable, ranks: int, latency: float, bandwidth: float) -> Picture:
    """The formula's time against size where each rank has its own link: latency in µs a step, bandwidth in GB/s."""
    figure, axis = picture(3.9)
    sizes = np.geomspace(KB, 2**30, 10_000)
    times = {way: seconds(way, ranks, sizes, latency / 1e6, 1e-9 / bandwidth) for way in OURS}
    for way, values in times.items():
        axis.plot(sizes, 1000 * values, color=WAYS[way], label=named(way))
    against_size(axis, {"1 kB": KB, "32 kB": 32 * KB, "1 MB": MB, "32 MB": 32 * MB, "1 GB": 2**30}, "milliseconds")
    for (name, size), side in zip(BUCKETS.items(), ("right", "left")):
        axis.axvline(size, color=IDEAL, ls=":")
        axis.annotate(name, (size, 0.03), xytext=(-6 if side == "right" else 6, 0), textcoords="offset points", ha=side,
                      xycoords=axis.get_xaxis_transform())
    faster = sizes[times["ring"] < np.minimum(*(times[way] for way in OURS[:2]))][0]
    where = f"{faster / MB:.2g} MB" if faster > MB else f"{faster / KB:.3g} kB"
    axis.set_title(f"{ranks} ranks, {latency:g} µs a step, {bandwidth:g} GB/s: the ring is the fastest above {where}")
    axis.legend(loc="upper left")
    return figure
