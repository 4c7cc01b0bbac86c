"""What 03_ddp/model_vs_data_parallelism.ipynb runs and draws: one network, shared between ranks in three ways.

The counts are those of three_ways.py on real ranks; splits, timetables and formulae are computed in the notebook's own
cells, and drawn here.
"""

import json
import shlex
import subprocess
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import NamedTuple

import numpy as np
import pandas as pd
from launch import ROOT
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import EngFormatter, StrMethodFormatter

from tools.style import ABSENT, IDEAL, MEASURED, PARALLEL, RANKS, STEP, TEXT, Picture, picture

NAMES = {"data": "data parallel", "tensor": "tensor parallel", "pipeline": "pipeline"}
HELD = ("parameters", "activations", "images", "labels")


class Run(NamedTuple):
    """What three_ways.py printed, and its records: first that of one process alone, then one of each way and rank."""
    text: str
    records: list[dict]

    def of(self, way: str) -> list[dict]:
        """The records of a way, in the order of the ranks."""
        return [record for record in self.records if record["way"] == way]


def run(command: str) -> Run:
    """Run a command that starts three_ways.py, in its folder."""
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        done = subprocess.run([*shlex.split(command), "--results", results], cwd=ROOT / "03_ddp", capture_output=True,
                              text=True)
        if done.returncode:
            raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr.strip()}")
        return Run(done.stdout, [json.loads(line) for line in results.read_text().splitlines()])


def last_step(record: dict) -> int:
    """The bytes that a rank has handed over in its last step."""
    return sum(size for _, size in record["sent"][-1])


# What each rank holds, and what it sends

def held(counted: Run) -> Picture:
    """Bars: the part of the parameters, activations, images and labels of one process that each rank holds."""
    alone, = counted.of("alone")
    figure, axes = picture(3.4, 1, len(NAMES), sharey=True)
    for axis, (way, name) in zip(axes, NAMES.items()):
        shares = pd.DataFrame({f"rank {record['rank']}": [record[what] / alone[what] for what in HELD]
                               for record in counted.of(way)}, index=HELD)
        (100 * shares).plot.barh(ax=axis, color=RANKS, width=0.8, legend=False)
        for bars in axis.containers:
            axis.bar_label(bars, [f"{bar.get_width():.0f}%" if bar.get_width() else "none" for bar in bars], padding=4)
        axis.axvline(100, color=IDEAL, linewidth=1, zorder=0)
        axis.set(title=name, xlim=(0, 160), xticks=[0, 50, 100])
    axes[0].invert_yaxis()
    axes[1].set_xlabel("% of what one process holds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


def columns_then_rows(x: np.ndarray, A: np.ndarray, B: np.ndarray, shares: list[np.ndarray]) -> Picture:
    """relu(x A) B on a rank for each of the shares: numbers as colours, grey where a rank holds nothing."""
    figure, axes = picture(0.4 + 1.05 * len(shares), len(shares), 6, squeeze=False, width_ratios=[
        *(matrix.shape[1] for matrix in (x, A, A, B, B, B))])
    hidden = np.maximum(x @ A, 0)
    for rank, (row, mine) in enumerate(zip(axes, shares)):
        absent = np.setdiff1d(np.arange(A.shape[1]), mine)
        matrices = {"x": x, "A: columns": A.copy(), "relu(x A)": hidden.copy(), "B: rows": B.copy(),
                    "its part": hidden[:, mine] @ B[mine], "sum": hidden @ B}
        matrices["A: columns"][:, absent] = matrices["relu(x A)"][:, absent] = matrices["B: rows"][absent] = np.nan
        for axis, (name, matrix) in zip(row, matrices.items()):
            most = np.nanmax(abs(matrix))
            axis.imshow(matrix, cmap="PuOr", vmin=-most, vmax=most)
            axis.set(facecolor=ABSENT, xticks=[], yticks=[], anchor="N")
            axis.spines[:].set_visible(False)
            if rank == 0:
                axis.set_title(name, fontsize=TEXT)
        row[0].set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center")
    return figure


def draw_factors(counted: Run, factors: pd.DataFrame) -> Picture:
    """What a rank hands over in a step at most, and how many times as much each way (column) sends with twice of it."""
    figure, axis = picture(3.8)
    axis.imshow(factors, cmap="Greys", vmin=1, vmax=2 * factors.to_numpy().max(), aspect="auto")
    for (row, column), factor in np.ndenumerate(factors):
        axis.text(column, row, f"x {factor:.2g}", ha="center", va="center", fontweight="bold" if factor > 1 else None)
    heads = [f"{NAMES[way]}\n{max(map(last_step, counted.of(way))) / 1000:,.0f} kB" for way in factors]
    axis.set_xticks(range(len(heads)), heads, fontweight="bold")
    axis.set_yticks(range(len(factors)), factors.index)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return figure


def growth(sent: Callable, width: int, layers: int, counted: list[Run] = ()) -> Picture:
    """Bytes by sent(way, ...) of a rank of two, against the rows in a step; points: what ranks have counted."""
    figure, axis = picture(3.5)
    rows = np.array([8, 100_000])
    for way, name in NAMES.items():
        axis.plot(rows, [sent(way, images=each, width=width, layers=layers) for each in rows], color=PARALLEL[way],
                  label=name)
        axis.plot([each.of(way)[0]["batch_size"] for each in counted], [last_step(each.of(way)[0]) for each in counted],
                  "o", color=MEASURED, zorder=3)
    equal = sent("data", width=width, layers=layers) / sent("tensor", images=1, width=width, layers=layers)
    axis.axvline(equal, color=IDEAL, linewidth=1.5, linestyle="--", zorder=0)
    axis.set(xscale="log", yscale="log", xlim=rows, ylim=(3e3, 1e12), ylabel="sent in a step",
             xlabel="rows in a step: images x sequence length",
             title=f"{layers} layers, {width:,} wide: data = tensor at {equal:,.0f} rows a step")
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.yaxis.set_major_formatter(EngFormatter("B"))
    axis.legend(loc="upper left", ncols=3)
    return figure


# The pipeline's timetables

def kept(records: list[dict]) -> list[str]:
    """The most that each stage keeps at a time: micro-batches that still need their backward, and kB."""
    most = [max(accumulate(1 if kind == "forward" else -1 for kind, _ in record["events"])) for record in records]
    return [f"keeps {number}: {record['activations'] / 1000:.0f} kB" for number, record in zip(most, records)]


def timetables(tables: dict[str, dict], behind: dict[str, list[str]] | None = None) -> Picture:
    """{title: {(stage, kind, micro-batch): slot}}, a panel each; behind: a text to the right of each stage's row."""
    figure, axes = picture(0.5 + 1.4 * len(tables), len(tables), 1, squeeze=False)
    for axis, (title, slots) in zip(axes[:, 0], tables.items()):
        length, stages = max(slots.values()) + 1, 1 + max(stage for stage, *_ in slots)
        axis.barh(range(stages), length, 0.9, left=-0.5, color=ABSENT)
        for (stage, kind, number), slot in slots.items():
            axis.barh(stage, 0.92, 0.84, left=slot - 0.46, color=STEP[kind])
            if length <= 24 and stages <= 4:
                axis.text(slot, stage, number, ha="center", va="center_baseline",
                          color="black" if kind == "forward" else "white")
        for stage, text in enumerate(behind[title] if behind else []):
            axis.text(length * 1.01 - 0.5, stage, text, va="center")
        axis.set(title=f"{title}: {1 - len(slots) / stages / length:.0%} of the slots are idle", xticks=[],
                 xlim=(-0.5, length * (1.3 if behind else 1) - 0.5), ylim=(stages - 0.5, -0.5))
        named = range(0, stages, 1 if stages <= 4 else stages - 1)  # of many only the first and the last
        axis.set_yticks(named, [f"rank {stage}" for stage in named])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.legend([Patch(color=color) for color in (STEP["forward"], STEP["backward"], ABSENT)],
                  ["forward", "backward", "waits"], loc="outside lower center", ncols=3)
    return figure


# Data x tensor x pipeline

def cube(ranks: np.ndarray, rank: int, groups: dict[str, np.ndarray]) -> Picture:
    """ranks[stage, part of the batch, part of each layer], and {way: the ranks with which this one communicates}."""
    figure, axes = picture(3.5, 1, len(ranks), sharey=True)
    for stage, (axis, block) in enumerate(zip(axes, ranks)):
        for (images, layers), other in np.ndenumerate(block):
            color = next((PARALLEL[way] for way in groups if other in groups[way]), ABSENT)
            axis.add_patch(Rectangle((layers - 0.45, images - 0.45), 0.9, 0.9, lw=4,
                                     edgecolor=MEASURED if other == rank else color,
                                     facecolor=RANKS[0] if other == rank else "white"))
            axis.text(layers, images, other, ha="center", va="center", fontweight="bold")
        axis.set(title=f"stage {stage}", xlabel="part of layers", xlim=(-0.5, block.shape[1] - 0.5),
                 xticks=range(block.shape[1]), ylim=(len(block) - 0.5, -0.5), yticks=range(len(block)))
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("part of batch")
    what = {"tensor": "partial results, in every pair of layers", "data": "gradients, once a step",
            "pipeline": "activations to the next stage, their gradients back"}
    figure.legend([Patch(color=PARALLEL[way]) for way in what], [
        f"{way} {', '.join(map(str, groups[way]))}: {text}" for way, text in what.items()], loc="outside lower left")
    return figure


def table(texts: pd.DataFrame, widths: int = 24) -> Picture:
    """Words in rows and columns, a column for each way."""
    filled = texts.map(lambda text: fill(text, widths))
    lines = filled.map(lambda text: text.count("\n") + 1.6).max(axis=1)
    figure, axis = picture(0.23 * (lines.sum() + 1.6))
    axis.axis("off")
    cells = axis.table(filled.to_numpy(), rowLabels=list(texts.index), colLabels=[NAMES[way] for way in texts],
                       cellLoc="left", loc="center", bbox=(0.12, 0, 0.88, 1))
    cells.auto_set_font_size(False)
    for (row, column), cell in cells.get_celld().items():
        cell.set(height=(lines.iloc[row - 1] if row else 1.6), edgecolor="white", fontsize=TEXT)
        cell.PAD = 0.03
        if column >= 0:
            cell.set(facecolor=PARALLEL[texts.columns[column]], alpha=0.15 if row else 1)
            cell.get_text().set(color="black" if row else "white", fontweight=None if row else "bold")
    return figure
