"""What 03_ddp/cost_model.ipynb draws and says: the cost model beside published runs, and beside our own records.

Times are seconds and rates bytes/s, as in 03_ddp/cost_model.py; an efficiency is images/s over those of one GPU times
the number of GPUs.
"""

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
from cost_model import CENTRAL, MB, OPTIMIST, PESSIMIST, Cluster, Constants, predict

from tools.pages.style import ABSENT, GPUS, IDEAL, MEASURED, PREDICTED, WAYS, Picture, head, picture

FITTED = ["Dell 2xXE8545x4A100-SXM-40GB", "Dell 8xXE8545x4A100-SXM-40GB", "Dell XE8545x4A100-SXM-80GB",
          "Dell 4xXE8545x4A100-SXM-80GB", "NVIDIA dgxh100_ngc23.04_mxnet", "NVIDIA dgxh100_n8_ngc23.04_mxnet"]
LARGEST = "NVIDIA_CoreWeave coreweave_hgxh100_n448_ngc23.04_mxnet"
DELL = ["Dell XE9680x8H100-SXM-80GB", "Dell 2xXE9680x8H100-SXM-80GB"]
ENDS = (2**16, 2**24)  # bytes: the two sizes from which D takes a link's latency and rate
CARRIERS = {"gloo": "gloo (DDP's)", "mpi": "MPI (Horovod's)"}


# --- what is read ---

def published_runs() -> pd.DataFrame:
    """The rows of assets/records/published.csv: their inputs and images/s, in the groups A, B and E."""
    return pd.read_csv(RECORDS / "published.csv").fillna("")


def mlperf_runs() -> pd.DataFrame:
    """MLPerf's ResNet-50 systems, with b, the images of a GPU in a step, and step, in seconds."""
    runs = pd.read_csv(RECORDS / "mlperf_v3.0_resnet50.csv")
    return runs.assign(b=runs.global_batch / runs.gpus, step=runs.global_batch / runs.images_per_second)


def all_reduces() -> pd.DataFrame:
    """Median seconds of an all-reduce of two ranks on our CPU, by carrier (columns) and bytes (rows)."""
    records = pd.DataFrame(published("allreduce.jsonl")).query("ranks == 2")
    times = records.groupby(["bytes", "algorithm"]).seconds.median().unstack()
    return times[list(CARRIERS)]


# --- the model beside published runs: A, B and E ---

def perfect(row: Mapping) -> float:
    """Images/s of a row if nothing were lost."""
    return row["base_images_per_second"] / row["base_gpus"] * row["nodes"] * row["gpus"]


def silent(row: Mapping) -> float:
    """What the model predicts, images/s, if communication cost nothing."""
    return predict({**row, "gradient_bytes": 1}, replace(CENTRAL, hop=0, level=0))


def compare(rows: pd.DataFrame, constants: Constants = CENTRAL) -> pd.DataFrame:
    """Efficiency of the rows, published and predicted with its band, and the relative error of the prediction."""
    each = rows.to_dict("records")
    ideal = np.array([perfect(row) for row in each])
    table = pd.DataFrame({
        "published": rows.images_per_second.to_numpy() / ideal,
        "predicted": [predict(row, constants) for row in each] / ideal,
        "low": [predict(row, PESSIMIST) for row in each] / ideal,
        "high": [predict(row, OPTIMIST) for row in each] / ideal,
        "no communication": [silent(row) for row in each] / ideal}, index=rows.name.to_numpy())
    return table.assign(error=table.predicted / table.published - 1)


def rivals(rows: pd.DataFrame) -> pd.DataFrame:
    """Median and largest error over the rows, of the model and of four simpler rules."""
    rules: dict[str, Callable[[Mapping], float]] = {
        "the model": predict,
        "no communication": silent,
        "no stragglers": lambda row: predict(row, replace(CENTRAL, jitter=0)),
        "perfect scaling": perfect,
        "always 90 %": lambda row: 0.9 * perfect(row)}
    found = {}
    for name, rule in rules.items():
        errors = [abs(rule(row) / row["images_per_second"] - 1) for row in rows.to_dict("records")]
        found[name] = {"median": np.median(errors), "largest": max(errors)}
    return pd.DataFrame(found).T


def draw_rows(axis: Axes, table: pd.DataFrame, left: float) -> None:
    """Published efficiencies as dots, predicted ones as dashes on their bands; the axis begins at `left`."""
    lanes = range(len(table))
    axis.hlines(lanes, table.low.clip(lower=left), table.high, color=ABSENT, lw=11)
    axis.plot(table.predicted, lanes, "|", ms=18, mew=3, color=PREDICTED)
    axis.plot(table.published, lanes, "o", color=MEASURED)
    axis.set_yticks(lanes, table.index)
    axis.invert_yaxis()
    axis.set_xlim(left, 1.01)
    axis.set_xlabel("efficiency" + (f" (the axis begins at {left:.0%})" if left else ""))
    axis.xaxis.set_major_locator(MultipleLocator(0.1 if left < 0.5 else 0.05))
    axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))


KEY = {"published": Line2D([], [], marker="o", ls="", color=MEASURED),
       "predicted": Line2D([], [], marker="|", ms=18, mew=3, ls="", color=PREDICTED),
       "its band": Line2D([], [], lw=11, color=ABSENT)}


def draw_network(rows: pd.DataFrame, usable: float = CENTRAL.usable, stragglers: float = 1) -> Picture:
    """A: the rows with this usable share of a link, and so many times the jitter; the band stays."""
    table = compare(rows, replace(CENTRAL, usable=usable, jitter=stragglers * CENTRAL.jitter))
    size = table.error.abs()
    figure, axis = picture(4.5)
    head(figure, f"{size.median():.1%} off in the median, {size.max():.1%} at most: {size.idxmax()}", KEY)
    draw_rows(axis, table, 0.4)
    return figure


def draw_rivals(found: pd.DataFrame) -> Picture:
    """Median and largest error of the model and of each simpler rule."""
    figure, axes = picture(3.4, 1, 2, sharey=True)
    for axis, column in zip(axes, ("median", "largest")):
        bars = axis.barh(found.index, found[column],
                         color=[PREDICTED if name == "the model" else IDEAL for name in found.index])
        axis.bar_label(bars, [f"{value:.1%}" for value in found[column]], padding=4)
        axis.set(title=f"{column} error", xlim=(0, 1.25 * found[column].max()), xticks=[])
        axis.spines["bottom"].set_visible(False)
        axis.tick_params(left=False)
    axes[0].invert_yaxis()
    return figure


def draw_node(rows: pd.DataFrame) -> Picture:
    """B: as A, and a ring for what the model says without communication."""
    table = compare(rows)
    figure, axis = picture(4.6)
    draw_rows(axis, table, 0.8)
    rings, = axis.plot(table["no communication"], range(len(table)), "o", ms=15, mfc="none", mew=2, color=IDEAL)
    head(figure, "Efficiency within one node", KEY | {"predicted without communication": rings})
    return figure


def on_network(table: pd.DataFrame, found: pd.DataFrame) -> str:
    """What A shows: `table` of compare, `found` of rivals."""
    ours, others = found.loc["the model"], found.drop("the model")
    inside = int(((table.low <= table.published) & (table.published <= table.high)).sum())
    worst = table.error.abs().idxmax()
    better = [f"*{name}* ({others.loc[name, 'median']:.1%})" for name in others.index
              if others.loc[name, "median"] < ours["median"]]
    beaten = f"only {' and '.join(better)} has a better one" if len(better) == 1 else (
        f"{' and '.join(better)} have better ones" if better else "no rule has a better one")
    steadier = [f"*{name}* ({others.loc[name, 'largest']:.1%})" for name in others.index
                if others.loc[name, "largest"] < ours["largest"]]
    largest = f"not better than that of {' and '.join(steadier)}" if steadier else "the smallest of all"
    return (f"**Median error:** the model's is {ours['median']:.1%}; {beaten}. **Largest error:** the model's is "
            f"{ours['largest']:.1%} ({worst}: {table.published[worst]:.0%} published, {table.predicted[worst]:.0%} "
            f"predicted), {largest}. {inside} of {len(table)} published values lie in the band.")


def on_node(table: pd.DataFrame) -> str:
    """What B shows; rows in mixed precision have AMP in their names."""
    mixed = table.index.str.contains("AMP")
    size = table.error.abs()
    moved = (table["no communication"] / table.predicted - 1).abs().max()
    tested = "So these rows cannot tell the model from one without communication" if moved < size[~mixed].max() else (
        "So these rows test communication, too")
    return (f"In fp32 and TF32 the model is at most {size[~mixed].max():.1%} off, in mixed precision (AMP) up to "
            f"{size[mixed].max():.0%}. Without any communication its predictions differ by {moved:.1%} at most. "
            f"**{tested}.**")


# --- a step as the model has it ---

def timeline(compute: float, gradient_bytes: float, cluster: Cluster, library: str = "DDP", overlap: bool = True,
             constants: Constants = CENTRAL) -> list[tuple[str, float, float]]:
    """The parts of cost_model.step_seconds as (what, start, end), seconds: forward, backward, then every all-reduce."""
    late = compute * (1 + constants.jitter * cost_model.slowest(cluster.ranks))
    filled = late * (1 - constants.backward)
    spans = [("forward", 0.0, filled), ("backward", filled, late)]
    free = 0.0
    for size in cost_model.bucket_sizes(gradient_bytes, library):
        filled += late * constants.backward * size / gradient_bytes
        start = max(filled if overlap else late, free)
        free = start + cost_model.all_reduce_seconds(size, cluster, constants)
        spans.append(("all-reduce", start, free))
    return spans


# --- C: MLPerf ---

def line(runs: pd.DataFrame) -> tuple[float, float]:
    """(t0, r) of the line step = t0 + b / r through these runs: seconds, and images/s of a GPU."""
    slope, t0 = np.polyfit(runs.b, runs.step, 1)
    return t0, 1 / slope


def step_lines(mlperf: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """(t0, r) of each type of GPU, from its two FITTED systems."""
    return {gpu: line(runs) for gpu, runs in mlperf[mlperf.system.isin(FITTED)].groupby("gpu")}


def held_out(mlperf: pd.DataFrame) -> pd.DataFrame:
    """The other systems with predicted images/s and the relative error."""
    lines, rows = step_lines(mlperf), mlperf[~mlperf.system.isin(FITTED)]
    t0 = rows.gpu.map({gpu: values[0] for gpu, values in lines.items()})
    rate = rows.gpu.map({gpu: values[1] for gpu, values in lines.items()})
    predicted = rows.global_batch / (t0 + rows.b / rate)
    return rows.assign(predicted=predicted, error=predicted / rows.images_per_second - 1)


def draw_mlperf(mlperf: pd.DataFrame) -> Picture:
    """C: a step's time over a GPU's images: two fitted runs (rings) of each type, their line, the others (dots)."""
    figure, axis = picture(4.2)
    fitted = mlperf.system.isin(FITTED)
    for gpu, (t0, rate) in step_lines(mlperf).items():
        images = np.array([0, 430])
        axis.plot(images, 1e3 * (t0 + images / rate), color=GPUS[gpu], label=gpu, zorder=1)
        for chosen, fill in ((fitted, "white"), (~fitted, GPUS[gpu])):
            runs = mlperf[chosen & (mlperf.gpu == gpu)]
            axis.plot(runs.b, 1e3 * runs.step, "o", color=GPUS[gpu], mfc=fill, mew=2.5, ms=10 if fill == "white" else 7,
                      zorder=2 if fill == "white" else 3)
    last = mlperf.set_index("system").loc[LARGEST]
    axis.annotate(f"{last.gpus:,} GPUs", (last.b, 1e3 * last.step), (60, 4), va="center",
                  arrowprops={"arrowstyle": "-", "color": MEASURED, "shrinkB": 7})
    axis.plot([], [], "o", color=MEASURED, mfc="white", mew=2.5, ms=10, label="fitted: two a line")
    axis.plot([], [], "o", color=MEASURED, ms=7, label="held out")
    axis.set(xlabel="images on a GPU in a step", ylabel="step [ms]", xlim=(0, 430), ylim=(0, None))
    axis.legend()
    return figure


def on_mlperf(mlperf: pd.DataFrame) -> str:
    """What C shows, and how much it matters which runs are fitted."""
    rows, last = held_out(mlperf), mlperf.set_index("system").loc[LARGEST]
    size = rows.error.abs()
    t0, rate = line(mlperf[mlperf.system.isin(DELL)])
    dell = last.step / (t0 + last.b / rate) - 1
    fitted = mlperf[mlperf.system.isin(FITTED)].b.round()
    new = size[~rows.b.round().isin(fitted)]
    return (f"Held out: {size.median():.1%} off in the median, {size.max():.1%} at most, up to {rows.gpus.max():,} "
            f"GPUs. {len(size) - len(new)} of the {len(size)} have as many images on a GPU as a fitted run, and say "
            f"how alike systems are; the other {len(new)} are {new.min():.1%} to {new.max():.1%} off. It matters which "
            "two runs are fitted: a line through Dell's systems with 8 and 16 H100 gives the largest system images/s "
            f"that are {abs(dell):.0%} too {'low' if dell < 0 else 'high'}.")


# --- D: our own records ---

def links(measured: pd.DataFrame) -> dict[str, tuple[Cluster, Constants]]:
    """Two ranks of our CPU as a cluster, by carrier: rate and latency from the two sizes of ENDS."""
    found = {}
    for carrier in measured:
        slope, latency = np.polyfit(ENDS, measured.loc[list(ENDS), carrier], 1)
        cluster = Cluster(2, 1, 1 / slope, np.inf, "ring", measured=True)
        found[carrier] = cluster, replace(CENTRAL, hop=latency / 2)  # a ring of two ranks has two hops
    return found


def own_errors(measured: pd.DataFrame) -> pd.DataFrame:
    """Relative errors of the all-reduces whose sizes are held out, by carrier."""
    found = links(measured)
    predicted = {carrier: [cost_model.all_reduce_seconds(size, *found[carrier]) for size in measured.index]
                 for carrier in measured}
    return (pd.DataFrame(predicted, index=measured.index) / measured - 1).drop(list(ENDS))


def draw_own(measured: pd.DataFrame) -> Picture:
    """D: seconds of an all-reduce by size; rings are the two sizes that fix the line, dots are held out."""
    figure, axes = picture(3.8, 1, 2, sharey=True)
    for axis, (carrier, (cluster, constants)) in zip(axes, links(measured).items()):
        sizes = np.geomspace(measured.index.min(), measured.index.max())
        axis.plot(sizes, [1e3 * cost_model.all_reduce_seconds(size, cluster, constants) for size in sizes],
                  color=PREDICTED, zorder=1, label="predicted")
        for chosen, fill, label in ((measured.index.isin(ENDS), "white", "fitted"),
                                    (~measured.index.isin(ENDS), WAYS[carrier], "held out")):
            times = measured.loc[chosen, carrier]
            axis.plot(times.index, 1e3 * times, "o", color=WAYS[carrier], mfc=fill, mew=2.5, ms=10, label=label)
        axis.set(title=CARRIERS[carrier], xlabel="size", xscale="log", yscale="log")
        axis.set_xticks([2**12, 2**16, 2**20, 2**24], ["4 kB", "64 kB", "1 MB", "16 MB"])
        axis.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        axis.set_ylim(0.07, 150)
        axis.minorticks_off()
        axis.legend()
    axes[0].set_ylabel("all-reduce [ms]")
    return figure


def on_own(errors: pd.DataFrame) -> str:
    """What D shows of the all-reduces."""
    size = errors.abs()
    good, worst = int((size <= 0.1).sum().sum()), size.stack().idxmax()
    wanted = "all are within 10 %" if good == size.size else (
        f"we wanted 10 %: {good} of {size.size} held-out times are within it")
    return (f"In the records: {wanted}; the worst is {size.max().max():.0%} off ({worst[1]}, {worst[0]:,} bytes). "
            "One rate does not fit all sizes.")


def own_steps(weak: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """A step on two ranks from that of one rank and the links, with and without overlap: relative errors.

    weak: the records of weak scaling.
    """
    speed = weak.groupby(["chapter", "ranks"]).images_per_second.median()
    gradients, rows = weak.gradient_bytes.iloc[0], {}
    for chapter, library, carrier in (("03_ddp", "DDP", "gloo"), ("02_horovod/pytorch", "Horovod", "mpi")):
        cluster, constants = links(measured)[carrier]
        step = 128 / speed[chapter, 2]
        found = [cost_model.step_seconds(64 / speed[chapter, 1], gradients, cluster, library, overlap, constants)
                 for overlap in (True, False)]
        rows[library] = {"overlap": found[0] / step - 1, "no overlap": found[1] / step - 1}
    return pd.DataFrame(rows).T


def on_own_steps(errors: pd.DataFrame) -> str:
    """What D shows of the steps: `errors` of own_steps."""
    same = errors.index[errors["overlap"].round(6) == errors["no overlap"].round(6)]
    text = "With overlap, as the profile of scaling.ipynb shows it, " + ", ".join(
        f"{name}'s step is {abs(errors.overlap[name]):.1%} off" for name in errors.index)
    by_luck = [name for name in errors.index if abs(errors["no overlap"][name]) < abs(errors.overlap[name])
               and name not in same]
    if by_luck:
        text += (f". Without overlap {' and '.join(by_luck)} would be hit better, but there is overlap: a hit for a "
                 "wrong reason")
    if len(same):
        text += (f". For {' and '.join(same)} the two are one: all gradients of this network fit into one buffer, and "
                 "the model sends a buffer when it is full. Horovod sends what is ready in a cycle, several "
                 "all-reduces a step: there the model is wrong")
    if (errors < 0).to_numpy().all():
        text += (". All predictions are too fast. A likely reason, not tested: the threads that all-reduce need the "
                 "cores that compute")
    return text + "."


# --- the trap ---

def trap(published_rows: pd.DataFrame, mlperf: pd.DataFrame) -> pd.DataFrame:
    """Errors of a tree and of a ring (rows), for Yamazaki's run and for MLPerf's largest system (columns)."""
    yamazaki = published_rows.set_index("name").loc["Yamazaki 2,048 V100"].to_dict()
    large = mlperf.set_index("system").loc[LARGEST]
    t0, rate = step_lines(mlperf)[large.gpu]
    errors = {}
    for algorithm in ("tree", "ring"):
        cluster = Cluster(448, 8, 400e9, 450e9, algorithm)
        step = cost_model.step_seconds(t0 + large.b / rate, yamazaki["gradient_bytes"], cluster, "Horovod")
        errors[algorithm] = {
            "Yamazaki, 2,048 V100": predict({**yamazaki, "algorithm": algorithm}) / yamazaki["images_per_second"] - 1,
            "MLPerf, 3,584 H100": large.global_batch / step / large.images_per_second - 1}
    return pd.DataFrame(errors).T


def draw_trap(errors: pd.DataFrame) -> Picture:
    """Errors of the tree and of the ring, for the row that one looks at, and for the next one."""
    figure, axes = picture(3.2, 1, 2, sharey=True)
    reach = 1.45 * errors.abs().max().max()
    for axis, name in zip(axes, errors):
        bars = axis.barh(errors.index, errors[name], color=PREDICTED, height=0.6)
        axis.bar_label(bars, [f"{error:+.0%}" for error in errors[name]], padding=4)
        axis.axvline(0, color=MEASURED, lw=1.5)
        axis.set(title=name, xlim=(-reach, reach), xticks=[], xlabel="error of the predicted images/s")
        axis.spines[["left", "bottom"]].set_visible(False)
        axis.tick_params(left=False)
    axes[0].invert_yaxis()
    return figure


def on_trap(errors: pd.DataFrame) -> str:
    """What the trap shows."""
    first, second = errors.columns
    chosen = errors[first].abs().idxmin()
    said = (f"The {chosen} is {abs(errors.loc[chosen, first]):.1%} off for one run and "
            f"{abs(errors.loc[chosen, second]):.0%} for the next")
    if abs(errors.loc[chosen, second]) > errors.drop(chosen)[second].abs().max():
        return said + ": it hits the first for a wrong reason. What is chosen to hit one row says nothing of the next."
    return said + "."


# --- for reading ---

def by_hand(row: Mapping) -> str:
    """The prediction of a row of A whose base is one GPU, step by step, in ms."""
    cluster = Cluster(*(row[name] for name in ("nodes", "gpus", "node_link", "gpu_link", "algorithm", "measured")))
    compute = row["batch"] / row["base_images_per_second"]
    late = compute * (1 + CENTRAL.jitter * cost_model.slowest(cluster.ranks))
    step = cost_model.step_seconds(compute, row["gradient_bytes"], cluster, row["buckets"])
    lines = [f"{cluster.nodes} nodes of {cluster.gpus} GPUs, {8 * cluster.node_link / 1e9:.0f} Gbit/s a node",
             f"compute of one GPU        {1e3 * compute:6.1f} ms   {row['batch']:.0f} images at "
             f"{row['base_images_per_second']:.0f} images/s",
             f"of the slowest of {cluster.ranks:4}    {1e3 * late:6.1f} ms"]
    for size in cost_model.bucket_sizes(row["gradient_bytes"], row["buckets"]):
        seconds = cost_model.all_reduce_seconds(size, cluster)
        lines.append(f"all-reduce of {size / MB:5.1f} MiB   {1e3 * seconds:6.1f} ms")
    published_efficiency = row["images_per_second"] / perfect(row)
    lines.append(f"the step                  {1e3 * step:6.1f} ms   efficiency {compute / step:.1%}, "
                 f"published {published_efficiency:.0%}")
    return "\n".join(lines)


def percent(table: pd.DataFrame) -> pd.DataFrame:
    """Efficiencies and errors as text."""
    return table.map("{:.1%}".format)


def folded(summary: str, content: str | pd.DataFrame) -> HTML:
    """A table, or text, under a line that a click opens."""
    inside = f"<pre>{escape(content)}</pre>" if isinstance(content, str) else content.to_html()
    return HTML(f"<details><summary>{escape(summary)}</summary>{inside}</details>")


def errors_of_systems(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of held_out as text."""
    return pd.DataFrame({
        "system": rows.system, "GPUs": rows.gpus.map("{:,}".format), "images a GPU": rows.b.map("{:.0f}".format),
        "images/s": rows.images_per_second.map("{:,.0f}".format), "predicted": rows.predicted.map("{:,.0f}".format),
        "error": rows.error.map("{:+.1%}".format)}).set_index("system")


def outside(rows: pd.DataFrame) -> pd.DataFrame:
    """E: what is published, what the model says with what is known, and why that is no prediction."""
    table = compare(rows)[["published", "predicted", "error"]].map("{:.0%}".format)
    table.columns = ["published", "with what is known", "error"]
    return table.assign(reason=rows.note.to_numpy())
