"""What 03_ddp/scaling.ipynb draws: what was measured, one step, published runs, and a plan for a cluster.

Its formulae stand in its cells; the functions here take them, or what they gave. An efficiency is images/s over those
of one rank, or GPU, times their number.
"""

from collections.abc import Callable, Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from records import published

from tools.style import ABSENT, CHAPTERS, GPUS, IDEAL, LIBRARIES, MEASURED, PREDICTED, STEP, Picture, head, picture

# --- what was measured here ---

def draw_measured(efficiency: Callable, weak: pd.DataFrame, strong: pd.DataFrame) -> Picture:
    """Efficiency over ranks: the median of the repeats, with the least and the most."""
    figure, axes = picture(4.2, 1, 2, sharey=True)
    entries = {}
    for axis, runs, title in ((axes[0], weak, "weak: {} images a rank"), (axes[1], strong, "strong: {} images in all")):
        entries["ideal"] = axis.axhline(1, ls="--", color=IDEAL)
        found = efficiency(runs).groupby([runs.chapter, runs.ranks]).agg(["median", "min", "max"])
        for number, (chapter, rows) in enumerate(found.groupby("chapter")):
            label, middle = CHAPTERS[chapter], rows["median"]
            entries[label] = axis.errorbar(
                rows.index.get_level_values("ranks") + 0.12 * (number - 1), middle,
                yerr=[middle - rows["min"], rows["max"] - middle], fmt="o-", capsize=5, color=LIBRARIES[label])
        most = runs.ranks.max() + 0.3
        entries["more ranks than cores"] = axis.axvspan(runs.cpus.iloc[0] + 0.5, most, color=ABSENT, zorder=0)
        axis.set(title=title.format(runs.batch.iloc[0]), xlabel="ranks", xticks=runs.ranks.unique(), xlim=(0.7, most),
                 ylim=(0, 1.25))
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0].set_ylabel("efficiency")
    head(figure, "ResNet-18 on a CPU of two cores", entries)
    return figure


# --- one step under the profiler ---

def profiled() -> pd.DataFrame:
    """The recorded steps, a row for each part of each rank; microseconds from the step's first event."""
    rows = [(CHAPTERS[record["chapter"]], number, record["rank"], *span)
            for record in published("step.jsonl") for number, spans in enumerate(record["steps"]) for span in spans]
    found = pd.DataFrame(rows, columns=["library", "step", "rank", "what", "start", "end"])
    first = found.groupby(["library", "step"]).start.transform("min")
    return found.assign(start=found.start - first, end=found.end - first)


def draw_spans(axis: Axes, spans: Iterable[tuple[str, float, float]], lane: float, unit: float) -> None:
    """Computation in this lane, all-reduces in the next; times in `unit`."""
    for what, start, end in spans:
        axis.barh(lane + (what == "all-reduce"), (end - start) / unit, left=start / unit, color=STEP[what],
                  edgecolor="white", height=0.9)


def draw_profiled(steps: pd.DataFrame, library: str) -> Picture:
    """The library's step of median length, in per cent of it; `steps` of profiled."""
    steps = steps[steps.library == library]
    lengths = steps.groupby("step").end.max().sort_values()
    step, length = lengths.index[len(lengths) // 2], lengths.iloc[len(lengths) // 2]
    figure, axis = picture(3.5)
    lanes = {}
    for rank, spans in steps[steps.step == step].groupby("rank"):
        draw_spans(axis, spans[["what", "start", "end"]].to_numpy(), 2.5 * rank, length / 100)
        lanes[2.5 * rank] = f"rank {rank}"
        if "all-reduce" in set(spans.what):
            lanes[2.5 * rank + 1] = "all-reduce"
    axis.set_yticks(list(lanes), lanes.values())
    axis.invert_yaxis()
    axis.set(xlabel="per cent of the step", xlim=(0, 100))
    head(figure, f"{library}: ResNet-18, 64 images a rank, two ranks on two cores",
         {what: Patch(color=color) for what, color in STEP.items()})
    return figure


# --- published runs, and the model ---

def draw_efficiencies(runs: pd.DataFrame, h100: pd.DataFrame) -> Picture:
    """Efficiency over GPUs of published runs, and of MLPerf's systems of H100 with their images a GPU."""
    figure, axis = picture(4.3)
    color = GPUS["H100-SXM-80GB"]
    axis.axhline(1, ls="--", color=IDEAL)
    axis.text(3600, 1.02, "ideal", color=IDEAL, ha="right")
    node, network = runs[runs.group == "B"], runs[runs.group == "A"]
    axis.plot(node.ranks, node.efficiency, "o", mfc="white", mew=2, color=MEASURED, label="within one node")
    axis.plot(network.ranks, network.efficiency, "o", color=MEASURED, label="over a network")
    axis.plot(h100.gpus, h100.efficiency, "s-", color=color, label="MLPerf, H100, with its images a GPU")
    for run in network[network.network == "VGG-16"].itertuples():
        axis.text(run.ranks * 1.12, run.efficiency, "VGG-16", va="center")
    for run in h100[h100.gpus != 768].itertuples():
        place, ha, va = ((1, 0.03), "left", "bottom") if run.gpus == 8 else ((0.93, -0.03), "right", "top")
        axis.text(run.gpus * place[0], run.efficiency + place[1], f"{run.global_batch / run.gpus:.0f} images",
                  color=color, ha=ha, va=va)
    ticks = [8, 16, 64, 128, 256, 512, 3584]
    axis.set(xscale="log", xlabel="GPUs", ylabel="efficiency", ylim=(0, 1.15), xlim=(7, 5000))
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.legend(loc="lower left")
    return figure


def draw_overlap(steps: dict[str, list[tuple[str, float, float]]], compute: float, title: str) -> Picture:
    """The spans of a predicted step, by its name; `compute` is that of one GPU alone."""
    figure, axes = picture(4.4, len(steps), 1, sharex=True)
    for axis, (name, spans) in zip(axes, steps.items()):
        computed, end = spans[1][2], spans[-1][2]
        draw_spans(axis, spans, 0, 1e-3)
        axis.barh(0, 1e3 * (end - computed), left=1e3 * computed, color=ABSENT, height=0.9)
        axis.set_yticks([0, 1], ["computes", "all-reduce"])
        axis.set_title(f"{name}: {1e3 * end:,.0f} ms, {1 - computed / end:.1%} exposed, efficiency {compute / end:.0%}")
        axis.invert_yaxis()
        axis.xaxis.set_major_formatter("{x:,.0f}")
    axes[-1].set_xlabel("milliseconds, predicted")
    colors = {what: STEP[what] for what in ("forward", "backward", "all-reduce")} | {"waits": ABSENT}
    head(figure, title, {what: Patch(color=color) for what, color in colors.items()})
    return figure


def draw_factors(ideal: float, factors: dict[str, float]) -> Picture:
    """A waterfall from the ideal speed-up to the one that was reached; on a log axis a factor is a length."""
    figure, axis = picture(3.6)
    bars, speed = {f"{ideal:.0f} times the GPUs": (0, ideal, f"{ideal:.0f}", IDEAL)}, ideal
    for name, factor in factors.items():
        bars[name] = speed * factor, speed, f"x {factor:.3f}", PREDICTED
        speed *= factor
    bars["times as fast"] = 0, speed, f"{speed:.0f}", MEASURED
    for lane, (left, right, text, color) in enumerate(bars.values()):
        axis.barh(lane, right - left, left=left, color=color)
        axis.text(right * 1.05, lane, text, va="center")
    axis.set_yticks(range(len(bars)), bars)
    axis.invert_yaxis()
    axis.set(xscale="log", xlim=(10, 900), xlabel="times as fast as 8 GPUs")
    axis.set_xticks([10, 30, 100, 300], ["10", "30", "100", "300"])
    axis.minorticks_off()
    return figure


def draw_plan(central: pd.DataFrame, low: pd.DataFrame, high: pd.DataFrame, nodes: int, enough: int) -> Picture:
    """Time and price over the number of nodes, with a band; a dot at `nodes`, a line at what is worth asking for."""
    yours = central.set_index("nodes").hours[nodes]
    figure, axes = picture(4.3, 1, 2, title=f"nodes: {nodes}, time: {60 * yours:,.0f} min, node hours: "
                                            f"{nodes * yours:,.1f}, worth asking for: {enough}")
    for axis, price in zip(axes, (False, True)):
        each = central.nodes if price else 1
        axis.fill_between(central.nodes, low.hours * each, high.hours * each, color=PREDICTED, alpha=0.2, lw=0)
        axis.plot(central.nodes, central.hours * each, color=PREDICTED)
        axis.plot(central.nodes, central.hours[0] / central.nodes * each, "--", color=IDEAL)
        axis.plot(nodes, yours * (nodes if price else 1), "o", ms=13, color=MEASURED)
        axis.axvline(enough, ls=":", color=MEASURED)
        axis.set(xscale="log", yscale="log", xlabel="nodes of 4 A100", title="node hours" if price else "time")
        axis.set_xticks(central.nodes[::2], central.nodes[::2])
        axis.minorticks_off()
    axes[0].set_ylim(0.01, 20)
    axes[0].set_yticks([1 / 60, 1 / 6, 1, 10], ["1 min", "10 min", "1 h", "10 h"])
    axes[1].set_ylim(1, 4000)
    axes[1].set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    return figure
