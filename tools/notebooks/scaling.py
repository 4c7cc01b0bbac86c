"""What 03_ddp/scaling.ipynb draws and says: what was measured, one step, published runs, and a plan for a cluster.

Times are seconds and rates bytes/s, as in 03_ddp/cost_model.py; an efficiency is images/s over those of one rank, or
GPU, times their number.
"""

import sys

import numpy as np
import pandas as pd
import sweep
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, PercentFormatter
from records import ROOT
from records import published as records_of

sys.path.append(str(ROOT / "03_ddp"))
from cost_model import CENTRAL, OPTIMIST, PESSIMIST, Cluster, Constants, plan, step_seconds, worth_asking_for

from tools.notebooks.cost_model import LARGEST, mlperf_runs, perfect, published_runs, step_lines, timeline
from tools.pages.style import (
    ABSENT,
    CHAPTERS,
    GPUS,
    IDEAL,
    LIBRARIES,
    MEASURED,
    PREDICTED,
    STEP,
    Picture,
    head,
    picture,
)

SMALLEST = "NVIDIA dgxh100_ngc23.04_mxnet"  # of MLPerf's H100 systems that NVIDIA entered
NETWORKS = {name: f"Horovod docs 512, {name}" for name in ("VGG-16", "ResNet-101", "Inception V3")}
LINKS = (1, 10, 25, 50, 100, 200)  # Gbit/s a node
NODES = [2**power for power in range(9)]
EPOCHS, IMAGES = 90, 1_281_167  # of ImageNet
A_GPU, TOGETHER = 256, 8192  # images in a step, at most
GAIN = 1.5  # times as fast, by a doubling that is worth asking for


# --- what was measured here ---

def measured(name: str) -> pd.DataFrame:
    """The records of assets/records/NAME.jsonl: weak or strong."""
    return pd.DataFrame(records_of(f"{name}.jsonl"))


def draw_measured(weak: pd.DataFrame, strong: pd.DataFrame) -> Picture:
    """Efficiency over ranks: the median of the repeats, with the least and the most."""
    figure, axes = picture(4.2, 1, 2, sharey=True)
    entries = {}
    for axis, records, title in ((axes[0], weak, "weak: {} images a rank"),
                                 (axes[1], strong, "strong: {} images in all")):
        found = sweep.summary(records)
        ranks = sorted(found.ranks.unique())
        entries["ideal"], = axis.plot([0.7, ranks[-1] + 0.3], [1, 1], "--", color=IDEAL)
        for number, (chapter, rows) in enumerate(found.groupby("chapter")):
            a_rank = rows["median"] / rows.efficiency  # images/s at an efficiency of 1
            below, above = ((rows["median"] - rows.least) / a_rank, (rows.most - rows["median"]) / a_rank)
            label = CHAPTERS[chapter]
            entries[label] = axis.errorbar(rows.ranks + 0.12 * (number - 1), rows.efficiency, yerr=[below, above],
                                           fmt="o-", capsize=5, color=LIBRARIES[label])
        cores = records.cpus.iloc[0]
        entries["more ranks than cores"] = axis.axvspan(cores + 0.5, ranks[-1] + 0.3, color=ABSENT, zorder=0)
        axis.set(title=title.format(found.batch.iloc[0]), xlabel="ranks", xticks=ranks, ylim=(0, 1.25))
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0].set_ylabel("efficiency")
    head(figure, "ResNet-18 on a CPU of two cores", entries)
    return figure


def on_measured(weak: pd.DataFrame, strong: pd.DataFrame) -> str:
    """What the records show of two ranks, and which of their numbers may be compared."""
    here, there = (sweep.summary(records).query("ranks == 2").set_index("chapter") for records in (weak, strong))
    text = (f"In the records two ranks keep {here.efficiency.min():.0%} to {here.efficiency.max():.0%} of twice one "
            f"rank's speed in weak scaling, {there.efficiency.min():.0%} to {there.efficiency.max():.0%} in strong.")
    if (2 * here.batch == there.batch).all():
        apart = (there["median"] / here["median"] - 1).abs().max()
        text += (f" On two ranks both panels ran the same, {here.batch.iloc[0]} images a rank, at another time, and "
                 f"their speeds differ by up to {apart:.0%}: compare within a panel.")
    return text


# --- one step under the profiler ---

def profiled(chapter: str) -> list[dict[int, list]]:
    """The recorded steps of a chapter by length: {rank: [(what, start, end)]}, microseconds from the first event."""
    records = sorted((record for record in records_of("step.jsonl") if record["chapter"] == chapter),
                     key=lambda record: record["rank"])
    steps = []
    for ranks in zip(*(record["steps"] for record in records)):
        zero = min(spans[0][1] for spans in ranks)
        steps.append({rank: [(what, start - zero, end - zero) for what, start, end in spans]
                      for rank, spans in enumerate(ranks)})
    return sorted(steps, key=length)


def length(step: dict[int, list]) -> float:
    """From the first event of a step to the last."""
    return max(end for spans in step.values() for _, _, end in spans)


def last(step: dict[int, list], what: str) -> list[float]:
    """When each rank that has it is through with it."""
    return [max(end for name, _, end in spans if name == what) for spans in step.values()
            if any(name == what for name, _, _ in spans)]


def exposed(step: dict[int, list]) -> tuple[float, float]:
    """Shares of a step: all wait for the last all-reduce; before that, one rank waits for the other's backward."""
    computed = last(step, "backward")
    after = max(0, max(last(step, "all-reduce")) - max(computed))
    return after / length(step), (max(computed) - min(computed)) / length(step)


def draw_spans(axis: Axes, spans: list, lane: float, unit: float = 1) -> None:
    """Computation in this lane, all-reduces in the next; times in `unit`."""
    for what, start, end in spans:
        axis.barh(lane + (what == "all-reduce"), (end - start) / unit, left=start / unit, color=STEP[what],
                  edgecolor="white", height=0.9)


def draw_profiled(chapter: str = "03_ddp") -> Picture:
    """The recorded step of median length, in per cent of it."""
    steps = profiled(chapter)
    step = steps[len(steps) // 2]
    figure, axis = picture(3.5)
    lanes = {}
    for rank, spans in step.items():
        draw_spans(axis, spans, 2.5 * rank, length(step) / 100)
        lanes[2.5 * rank] = f"rank {rank}"
        if any(what == "all-reduce" for what, _, _ in spans):
            lanes[2.5 * rank + 1] = "all-reduce"
    axis.set_yticks(list(lanes), lanes.values())
    axis.invert_yaxis()
    axis.set(xlabel="per cent of the step", xlim=(0, 100))
    head(figure, f"{CHAPTERS[chapter]}: ResNet-18, 64 images a rank, two ranks on two cores",
         {what: Patch(color=color) for what, color in STEP.items()})
    return figure


def on_profiled(steps: list[dict[int, list]]) -> str:
    """How much of the steps is waiting; `steps` of profiled."""
    shares = np.array([exposed(step) for step in steps])
    (after, other), low, high = np.median(shares, axis=0), shares.min(axis=0), shares.max(axis=0)
    sent = hidden = 0.0
    for step in steps:
        computed = max(last(step, "backward"))
        for spans in step.values():
            for what, start, end in spans:
                if what == "all-reduce":
                    sent += end - start
                    hidden += max(0.0, min(end, computed) - start)
    return (f"in the records {hidden / sent:.0%} of the all-reduces' time passes before the last rank is through with "
            f"backward, the wait for that rank included. **Exposed**, after all backwards: {after:.1%} of a step "
            f"({low[0]:.1%} to {high[0]:.1%} in {len(steps)} steps). One rank waits for the other's backward: "
            f"{other:.1%} ({low[1]:.1%} to {high[1]:.1%}).")


# --- published runs ---

def efficiencies() -> pd.DataFrame:
    """Efficiency and GPUs of the published runs whose one-GPU rate is known: groups A and B, and MLPerf's H100."""
    rows = published_runs()
    rows = rows[rows.group != "E"]
    found = pd.DataFrame({"group": rows.group, "name": rows.name, "network": rows.network,
                          "gpus": rows.nodes * rows.gpus, "batch": rows.batch, "gradient_bytes": rows.gradient_bytes,
                          "efficiency": [row["images_per_second"] / perfect(row) for row in rows.to_dict("records")]})
    h100 = mlperf_runs().query("gpu == 'H100-SXM-80GB' and system.str.startswith('NVIDIA')")
    each = h100.images_per_second / h100.gpus
    mlperf = pd.DataFrame({"group": "MLPerf", "name": h100.system, "network": "ResNet-50", "gpus": h100.gpus,
                           "batch": h100.b, "efficiency": each / each.iloc[0]})
    return pd.concat([found, mlperf], ignore_index=True)


def table(found: pd.DataFrame) -> str:
    """The rows of efficiencies as text."""
    rows = pd.DataFrame({"": found.name, "network": found.network, "GPUs": found.gpus.map("{:,}".format),
                         "images a GPU": found.batch.map("{:.0f}".format),
                         "MB of gradients": (found.gradient_bytes / 1e6).map("{:.0f}".format).replace("nan", ""),
                         "efficiency": found.efficiency.map("{:.0%}".format)})
    return rows.to_string(index=False)


def draw_efficiencies(found: pd.DataFrame) -> Picture:
    """Efficiency over GPUs."""
    figure, axis = picture(4.3)
    color = GPUS["H100-SXM-80GB"]
    axis.axhline(1, ls="--", color=IDEAL)
    axis.text(3600, 1.02, "ideal", color=IDEAL, ha="right")
    node, network, mlperf = (found[found.group == group] for group in ("B", "A", "MLPerf"))
    axis.plot(node.gpus, node.efficiency, "o", mfc="white", mew=2, color=MEASURED, label="within one node")
    axis.plot(network.gpus, network.efficiency, "o", color=MEASURED, label="over a network")
    axis.plot(mlperf.gpus, mlperf.efficiency, "s-", color=color, label="MLPerf, H100, with its images a GPU")
    for row in network[network.network == "VGG-16"].itertuples():
        axis.text(row.gpus * 1.12, row.efficiency, "VGG-16", va="center")
    first, *others = mlperf[mlperf.gpus != 768].itertuples()
    axis.text(first.gpus, 1.03, f"{first.batch:.0f} images", color=color)
    for row in others:
        axis.text(row.gpus * 0.93, row.efficiency - 0.03, f"{row.batch:.0f} images", va="top", ha="right", color=color)
    axis.set(xscale="log", xlabel="GPUs", ylabel="efficiency", ylim=(0, 1.15), xlim=(7, 5000))
    ticks = [8, 16, 64, 128, 256, 512, 3584]
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.legend(loc="lower left")
    return figure


def on_efficiencies(found: pd.DataFrame) -> str:
    """What the published efficiencies show."""
    network, mlperf = found[found.group == "A"], found[found.group == "MLPerf"].sort_values("gpus")
    low, first, end = network.loc[network.efficiency.idxmin()], mlperf.iloc[0], mlperf.iloc[-1]
    heaviest = ", the most of these networks" if low.gradient_bytes == network.gradient_bytes.max() else ""
    kept = f"{network.efficiency.min():.0%} to {network.efficiency.max():.0%}"
    text = (f"With {network.gpus.min()} to {network.gpus.max()} GPUs over a network {kept} is kept; least "
            f"by {low.network} on {low.gpus} GPUs, with {low.gradient_bytes / 1e6:.0f} MB of gradients{heaviest}. ")
    return text + (f"MLPerf's H100 keep {end.efficiency:.0%} on {end.gpus:,}, where each takes {end.batch:.0f} images "
                   f"a step and not {first.batch:.0f}.")


# --- a step with and without overlap ---

def published_step(network: str, gigabits: float, overlap: bool) -> tuple[list, float]:
    """A step's spans on Horovod's 512 GPUs, had a node this link, in Gbit/s; and its efficiency."""
    row = published_runs().set_index("name").loc[NETWORKS[network]]
    cluster = Cluster(row.nodes, row.gpus, gigabits * 1e9 / 8, row.gpu_link, row.algorithm)
    compute = row.batch / row.base_images_per_second
    spans = timeline(compute, row.gradient_bytes, cluster, row.buckets, overlap)
    return spans, compute / step_seconds(compute, row.gradient_bytes, cluster, row.buckets, overlap)


def draw_overlap(network: str = "VGG-16", gigabits: float = 25) -> Picture:
    """The model's step of the slowest of 512 GPUs, with and without overlap."""
    figure, axes = picture(4.4, 2, 1, sharex=True)
    for axis, overlap in zip(axes, (True, False)):
        spans, efficiency = published_step(network, gigabits, overlap)
        computed, end = spans[1][2], max(span[2] for span in spans)
        draw_spans(axis, spans, 0)
        axis.barh(0, end - computed, left=computed, color=ABSENT, height=0.9)
        if (end - computed) / end > 0.08:
            axis.text((computed + end) / 2, 0, "waits", ha="center", va="center")
        axis.set_yticks([0, 1], ["computes", "all-reduce"])
        axis.set_title(f"{'with' if overlap else 'without'} overlap: {1e3 * end:,.0f} ms, efficiency {efficiency:.0%}")
        axis.invert_yaxis()
        axis.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{1e3 * seconds:,.0f}"))
    axes[1].set_xlabel("milliseconds, predicted")
    head(figure, f"{network}, 128 nodes of 4 GPUs, {gigabits} Gbit/s a node",
         {what: Patch(color=STEP[what]) for what in ("forward", "backward", "all-reduce")})
    return figure


def overlaps(network: str) -> pd.DataFrame:
    """By link: efficiencies with and without overlap, the share of the step that is exposed, what was published."""
    row = published_runs().set_index("name").loc[NETWORKS[network]]
    found = {}
    for gigabits in LINKS:
        spans, kept = published_step(network, gigabits, overlap=True)
        _, alone = published_step(network, gigabits, overlap=False)
        found[gigabits] = {"with": kept, "without": alone, "exposed": 1 - spans[1][2] / spans[-1][2],
                           "published": row.images_per_second / perfect(row)}
    return pd.DataFrame(found).T


def on_overlap(found: pd.DataFrame, gigabits: float) -> str:
    """What overlap saves with this link, and which link leaves next to nothing exposed; `found` of overlaps."""
    here = found.loc[gigabits]
    text = (f"With {gigabits} Gbit/s the model says {here['with']:.0%} with overlap, {here['without']:.0%} without; "
            f"published are {here['published']:.0%}. ")
    left = ", ".join(f"{row.exposed:.1%} at {link} Gbit/s" for link, row in found.iterrows() if link > gigabits)
    return text + f"Of the step is exposed: {left}."


# --- from 8 to 3,584 GPUs ---

def factors(mlperf: pd.DataFrame) -> dict[str, float]:
    """From MLPerf's smallest to its largest system: how many times the GPUs, and three factors of what is kept.

    GPUs x epochs x throughput x rest is how many times as fast the training is, exactly.
    """
    runs = mlperf.set_index("system")
    small, large = runs.loc[SMALLEST], runs.loc[LARGEST]
    more = large.gpus / small.gpus
    epochs = small.epochs / large.epochs
    throughput = large.images_per_second / small.images_per_second / more
    faster = small.seconds_to_train / large.seconds_to_train
    return {"gpus": more, "epochs": epochs, "throughput": throughput, "rest": faster / more / epochs / throughput}


def draw_factors(mlperf: pd.DataFrame) -> Picture:
    """A waterfall from the ideal speed-up to the one that was reached; on a log axis a factor is a length."""
    found, runs = factors(mlperf), mlperf.set_index("system")
    small, large = runs.loc[SMALLEST], runs.loc[LARGEST]
    names = [f"{found['gpus']:.0f} times the GPUs", f"{large.epochs} epochs, not {small.epochs}",
             f"images/s a GPU ({large.b:.0f}, not {small.b:.0f})", "start, evaluation, the rest", "times as fast"]
    figure, axis = picture(3.6)
    speed = found["gpus"]
    axis.barh(0, speed, color=IDEAL)
    axis.text(speed * 1.05, 0, f"{speed:.0f}", va="center")
    for lane, name in enumerate(("epochs", "throughput", "rest"), 1):
        axis.barh(lane, speed * (1 - found[name]), left=speed * found[name], color=PREDICTED)
        axis.text(speed * 1.05, lane, f"x {found[name]:.3f}", va="center")
        speed *= found[name]
    axis.barh(4, speed, color=MEASURED)
    axis.text(speed * 1.05, 4, f"{speed:.0f}", va="center")
    axis.set_yticks(range(5), names)
    axis.invert_yaxis()
    axis.set(xscale="log", xlim=(10, 900), xlabel="times as fast as 8 GPUs")
    axis.set_xticks([10, 30, 100, 300], ["10", "30", "100", "300"])
    axis.minorticks_off()
    return figure


def on_factors(mlperf: pd.DataFrame) -> str:
    """The product, and what each factor is."""
    found, runs = factors(mlperf), mlperf.set_index("system")
    small, large = runs.loc[SMALLEST], runs.loc[LARGEST]
    kept = found["epochs"] * found["throughput"] * found["rest"]
    return (f"{found['gpus']:.0f} times the GPUs, {kept * found['gpus']:.0f} times as fast: **{kept:.1%} = "
            f"{found['epochs']:.3f} x {found['throughput']:.3f} x {found['rest']:.3f}**. A global batch of "
            f"{large.global_batch:,} images and not {small.global_batch:,} takes {large.epochs} epochs and not "
            f"{small.epochs}, and leaves a GPU {large.b:.0f} images at a time and not {small.b:.0f}: the second factor "
            "is that and all communication.")


# --- how many nodes ---

def planned(gigabits: float, constants: Constants = CENTRAL, together: int = TOGETHER) -> pd.DataFrame:
    """90 epochs of ImageNet with ResNet-50 on nodes of 4 A100 with this link a node: a row for each number of nodes."""
    t0, rate = step_lines(mlperf_runs())["A100-SXM-40GB"]
    cluster = Cluster(nodes=1, gpus=4, node_link=gigabits * 1e9 / 8, gpu_link=300e9)
    return pd.DataFrame(plan(
        images=EPOCHS * IMAGES, images_per_second=rate, start=t0, batch=A_GPU, largest_batch=together,
        gradient_bytes=102e6, cluster=cluster, node_counts=NODES, constants=constants))


def worth(rows: pd.DataFrame) -> int:
    """The most nodes to which every doubling made the training GAIN times as fast; `rows` of planned."""
    return worth_asking_for(rows.to_dict("records"), GAIN)


def minutes(hours: float) -> str:
    """A time as text: in minutes, or in hours from two on."""
    return f"{60 * hours:.0f} min" if hours < 2 else f"{hours:.1f} h"


def draw_plan(nodes: int = 8, gigabits: float = 25) -> Picture:
    """Time and price over the number of nodes, with the band of the constants; a dot where you stand."""
    middle, low, high = (planned(gigabits, constants) for constants in (CENTRAL, PESSIMIST, OPTIMIST))
    yours, enough = middle.set_index("nodes").hours[nodes], worth(middle)
    title = (f"{nodes} node{'s' * (nodes > 1)}, {gigabits} Gbit/s each: {minutes(yours)}, {nodes * yours:,.1f} node "
             f"hours. Worth asking for: {enough}")
    figure, axes = picture(4.3, 1, 2, title=title)
    for axis, price in zip(axes, (False, True)):
        each = middle.nodes if price else 1
        axis.fill_between(middle.nodes, low.hours * each, high.hours * each, color=PREDICTED, alpha=0.2, lw=0)
        axis.plot(middle.nodes, middle.hours * each, color=PREDICTED)
        axis.plot(middle.nodes, middle.hours[0] / middle.nodes * each, "--", color=IDEAL)
        axis.plot(nodes, yours * (nodes if price else 1), "o", ms=13, color=MEASURED)
        axis.axvline(enough, ls=":", color=MEASURED)
        axis.set(xscale="log", yscale="log", xlabel="nodes of 4 A100", title="node hours" if price else "time")
        axis.set_xticks(NODES[::2], NODES[::2])
        axis.minorticks_off()
    axes[0].set_ylim(0.01, 20)
    axes[0].set_yticks([1 / 60, 1 / 6, 1, 10], ["1 min", "10 min", "1 h", "10 h"])
    axes[1].set_ylim(1, 4000)
    axes[1].set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    return figure


def on_plan(plans: dict[float, pd.DataFrame], gigabits: float) -> str:
    """What the plans say; the price for this link. plans: rows of planned by Gbit/s."""
    hours = plans[gigabits].set_index("nodes").hours
    price = 64 * hours[64] / (8 * hours[8])
    text = f"With {gigabits} Gbit/s 64 nodes cost {price:.1f} times the node hours of 8. Worth asking for, dotted: "
    parts, slow = [], ""
    for link, rows in plans.items():
        hours, nodes = rows.set_index("nodes").hours, worth(rows)
        parts.append(f"**{link} Gbit/s**: {nodes} node{'s' * (nodes > 1)}, {minutes(hours[nodes])}")
        if hours[2] > hours[1]:
            slow += f" With {link} Gbit/s two nodes ({minutes(hours[2])}) are slower than one ({minutes(hours[1])})."
    return text + "; ".join(parts) + "." + slow


def optimism() -> str:
    """How the plan's rate of a GPU compares with a published run that is no record."""
    t0, rate = step_lines(mlperf_runs())["A100-SXM-40GB"]
    row = published_runs().set_index("name").loc["MXNet 8 A100 AMP"]
    planned_rate = A_GPU / (t0 + A_GPU / rate)
    return (f"With {A_GPU} images the plan's A100 computes {planned_rate:,.0f} images/s; in NVIDIA's own example "
            f"(MXNet, mixed precision) one does {row.base_images_per_second:,.0f}: the plan is "
            f"{planned_rate / row.base_images_per_second - 1:+.0%}.")
