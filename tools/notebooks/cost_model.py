"""What 03_ddp/cost_model.ipynb reads and draws: the cost model beside published runs, and beside our own records.

Times are seconds and rates bytes/s, as in 03_ddp/cost_model.py; an efficiency is images/s over those of one GPU times
the number of GPUs. The notebook's own cells have the formula, and hand it to what draws.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape

import numpy as np
import pandas as pd
from IPython.display import HTML
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator, PercentFormatter
from records import RECORDS, ROOT, published

sys.path.append(str(ROOT / "03_ddp"))
import cost_model
from cost_model import CENTRAL, OPTIMIST, PESSIMIST, Constants

from tools.style import ABSENT, GPUS, IDEAL, MEASURED, PREDICTED, STEP, WAYS, Picture, head, picture

FITTED = ["Dell 2xXE8545x4A100-SXM-40GB", "Dell 8xXE8545x4A100-SXM-40GB", "Dell XE8545x4A100-SXM-80GB",
          "Dell 4xXE8545x4A100-SXM-80GB", "NVIDIA dgxh100_ngc23.04_mxnet", "NVIDIA dgxh100_n8_ngc23.04_mxnet"]
LARGEST = "NVIDIA_CoreWeave coreweave_hgxh100_n448_ngc23.04_mxnet"
ENDS = [2**16, 2**24]  # bytes: the two sizes from which D takes a link's latency and rate
CARRIERS = {"gloo": "gloo (DDP's)", "mpi": "MPI (Horovod's)"}
SILENT = replace(CENTRAL, hop=0, level=0, usable=math.inf)  # communication costs nothing


# --- what is read ---

def perfect(row: Mapping) -> float:
    """Images/s of a row if nothing were lost."""
    return row["base_images_per_second"] / row["base_gpus"] * row["nodes"] * row["gpus"]


def published_runs() -> pd.DataFrame:
    """The rows of assets/records/published.csv, in the groups A, B and E.

    Three columns are added: compute, the seconds of a step of the base run; link, the rate of the slowest link, which
    is that between nodes if there are several; and perfect, images/s if nothing were lost.
    """
    rows = pd.read_csv(RECORDS / "published.csv").fillna("")
    return rows.assign(compute=rows.batch * rows.base_gpus / rows.base_images_per_second,
                       link=rows.node_link.where(rows.nodes > 1, rows.gpu_link), perfect=perfect(rows))


def mlperf_runs() -> pd.DataFrame:
    """MLPerf's ResNet-50 systems, with b, the images of a GPU in a step, and step, in seconds."""
    runs = pd.read_csv(RECORDS / "mlperf_v3.0_resnet50.csv")
    return runs.assign(b=runs.global_batch / runs.gpus, step=runs.global_batch / runs.images_per_second)


def all_reduces() -> pd.DataFrame:
    """Median seconds of an all-reduce of two ranks on our CPU, by carrier (columns) and bytes (rows)."""
    records = pd.DataFrame(published("allreduce.jsonl")).query("ranks == 2")
    times = records.groupby(["bytes", "algorithm"]).seconds.median().unstack()
    return times[list(CARRIERS)]


# --- one step ---

def draw_step(spans: list[tuple[str, float, float]], alone: float) -> Picture:
    """(what, start, end) of a step's parts; alone: the seconds that a GPU takes for it without others."""
    figure, axis = picture(3.2)
    computed = next(end for what, _, end in spans if what == "backward")
    last = max(end for *_, end in spans)
    for what, start, end in spans:
        axis.barh(what == "all-reduce", 1e3 * (end - start), 0.8, left=1e3 * start, color=STEP[what], edgecolor="white",
                  label=what)
    axis.barh(0, 1e3 * (last - computed), 0.8, left=1e3 * computed, color=ABSENT, label="waits")
    axis.set_yticks([0, 1], ["computes", "all-reduce"])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds")
    handles, labels = axis.get_legend_handles_labels()
    head(figure, f"{1e3 * computed:,.0f} ms of computing + {1e3 * (last - computed):,.0f} ms that nothing hides: "
                 f"efficiency {alone / last:.0%}", dict(zip(labels, handles)))
    return figure


# --- published runs: A and B ---

def by_cost_model(run: object, constants: Constants) -> float:
    return cost_model.predict(run._asdict(), constants)


def compare(rows: pd.DataFrame, predict: Callable = by_cost_model, constants: Constants = CENTRAL) -> pd.DataFrame:
    """Efficiency of the rows, published and predicted with its band, and the relative error of the prediction.

    predict(run, constants): images/s of a row, a named tuple.
    """
    columns = {"published": rows.images_per_second.to_numpy()}
    for name, chosen in {"predicted": constants, "low": PESSIMIST, "high": OPTIMIST, "silent": SILENT}.items():
        columns[name] = [predict(run, chosen) for run in rows.itertuples()]
    table = pd.DataFrame(columns, index=rows.name.to_numpy()).div(rows.perfect.to_numpy(), axis=0)
    return table.assign(error=table.predicted / table.published - 1)


def errors(rows: pd.DataFrame, rules: dict[str, Callable]) -> pd.DataFrame:
    """Median and largest relative error of each rule, which says images/s of a row."""
    found = {name: [abs(rule(run) / run.images_per_second - 1) for run in rows.itertuples()]
             for name, rule in rules.items()}
    return pd.DataFrame(found).agg(["median", "max"]).T.set_axis(["median error", "largest error"], axis=1)


def draw_rows(table: pd.DataFrame, left: float, title: str, silent: bool = False) -> Picture:
    """A row for each run of compare(), from the efficiency `left` on; silent: rings for what it is without waiting."""
    figure, axis = picture(4.6)
    lanes = range(len(table))
    axis.hlines(lanes, table.low.clip(lower=left), table.high, color=ABSENT, lw=11)
    axis.plot(table.predicted, lanes, "|", ms=18, mew=3, color=PREDICTED)
    axis.plot(table.published, lanes, "o", color=MEASURED)
    entries = {"published": Line2D([], [], marker="o", ls="", color=MEASURED),
               "predicted": Line2D([], [], marker="|", ms=18, mew=3, ls="", color=PREDICTED),
               "its band": Line2D([], [], lw=11, color=ABSENT)}
    if silent:
        entries["without communication"], = axis.plot(table.silent, lanes, "o", ms=15, mfc="none", mew=2, color=IDEAL)
    axis.set_yticks(lanes, table.index)
    axis.invert_yaxis()
    axis.set(xlim=(left, 1.01), xlabel=f"efficiency (the axis begins at {left:.0%})")
    axis.xaxis.set_major_locator(MultipleLocator(0.1 if left < 0.5 else 0.05))
    axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    head(figure, title, entries)
    return figure


def draw_bars(table: pd.DataFrame, form: str, left: float = 0) -> Picture:
    """A panel for each column, a bar for each row, the first coloured; left: -1 where numbers are negative, too."""
    figure, axes = picture(1 + 0.5 * len(table), 1, len(table.columns), sharey=True)
    for axis, name in zip(axes, table):
        reach = 1.4 * table[name].abs().max()
        bars = axis.barh(table.index, table[name], 0.7, color=[PREDICTED, *[IDEAL] * (len(table) - 1)])
        axis.bar_label(bars, [form.format(value) for value in table[name]], padding=4)
        axis.axvline(0, color=MEASURED, lw=1.5)
        axis.set(title=name, xlim=(left * reach, reach), xticks=[])
        axis.spines[["left", "bottom"]].set_visible(False)
        axis.tick_params(left=False)
    axes[0].invert_yaxis()
    return figure


# --- C: MLPerf; D: our own records ---

def line(runs: pd.DataFrame) -> tuple[float, float]:
    """(t0, r) of the line step = t0 + b / r through these runs: seconds, and images/s of a GPU."""
    slope, t0 = np.polyfit(runs.b, runs.step, 1)
    return t0, 1 / slope


def step_lines(mlperf: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """(t0, r) of each type of GPU, from its two FITTED systems."""
    return {gpu: line(runs) for gpu, runs in mlperf[mlperf.system.isin(FITTED)].groupby("gpu")}


def points(axis: Axes, x: pd.Series, y: pd.Series, fitted: np.ndarray, color: str) -> None:
    """Rings for what a line was fitted to, dots for what was held out."""
    axis.plot(x[fitted], y[fitted], "o", color=color, mfc="white", mew=2.5, ms=10, label="fitted")
    axis.plot(x[~fitted], y[~fitted], "o", color=color, ms=7, label="held out")


def draw_mlperf(mlperf: pd.DataFrame) -> Picture:
    """C: a step's time over a GPU's images, and the line of each type of GPU."""
    figure, axis = picture(4.2)
    images, held_out = np.array([0, 430]), []
    for gpu, (t0, rate) in step_lines(mlperf).items():
        runs = mlperf[mlperf.gpu == gpu]
        fitted = runs.system.isin(FITTED)
        axis.plot(images, 1e3 * (t0 + images / rate), color=GPUS[gpu], zorder=1)
        axis.text(432, 1e3 * (t0 + 430 / rate), gpu, color=GPUS[gpu], va="center")
        points(axis, runs.b, 1e3 * runs.step, fitted, GPUS[gpu])
        held_out += list(abs(runs.step / (t0 + runs.b / rate) - 1)[~fitted])
    last = mlperf.set_index("system").loc[LARGEST]
    axis.annotate(f"{last.gpus:,} GPUs", (last.b, 1e3 * last.step), (60, 4), va="center",
                  arrowprops={"arrowstyle": "-"})
    axis.set(xlabel="images on a GPU in a step", ylabel="step [ms]", xlim=(0, 430), ylim=(0, None),
             title=f"held out: {np.median(held_out):.1%} off in the median, {max(held_out):.1%} at most")
    axis.legend(*([found[-2:] for found in axis.get_legend_handles_labels()]))
    return figure


def latency_and_rate(times: pd.Series) -> tuple[float, float]:
    """Of an all-reduce of two ranks, from its seconds at the two ENDS."""
    slope, latency = np.polyfit(ENDS, times[ENDS], 1)
    return latency, 1 / slope


def draw_own(measured: pd.DataFrame) -> Picture:
    """D: seconds of an all-reduce by size; rings are the two sizes that fix the line."""
    figure, axes = picture(3.8, 1, 2, sharey=True)
    for axis, (carrier, times) in zip(axes, measured.items()):
        latency, rate = latency_and_rate(times)
        sizes = np.geomspace(times.index.min(), times.index.max())
        axis.plot(sizes, 1e3 * (latency + sizes / rate), color=PREDICTED, zorder=1, label="predicted")
        points(axis, times.index, 1e3 * times, times.index.isin(ENDS), WAYS[carrier])
        off = abs((latency + times.index / rate) / times - 1).drop(ENDS)
        axis.set(title=f"{CARRIERS[carrier]}: {off.max():.0%} off at most", xlabel="size", xscale="log", yscale="log",
                 ylim=(0.07, 150))
        axis.set_xticks([2**12, 2**16, 2**20, 2**24], ["4 kB", "64 kB", "1 MB", "16 MB"])
        axis.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        axis.minorticks_off()
        axis.legend()
    axes[0].set_ylabel("all-reduce [ms]")
    return figure


def folded(summary: str, content: str | pd.DataFrame) -> HTML:
    """A table, or text, under a line that a click opens."""
    inside = f"<pre>{escape(content)}</pre>" if isinstance(content, str) else content.to_html()
    return HTML(f"<details><summary>{escape(summary)}</summary>{inside}</details>")
