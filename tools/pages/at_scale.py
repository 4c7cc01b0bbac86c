"""What 03_ddp/AT_SCALE.md shows of 03_ddp/at_scale.py: its figure, and its predictions beside what is published.

    python -m tools.pages.at_scale          # the tables of published runs and of failures
"""

import sys
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from records import RECORDS, ROOT

sys.path.append(str(ROOT / "03_ddp"))
import at_scale
import cost_model
from at_scale import GIVEN, H100, HOUR, MODEL_7B, Link
from cost_model import CENTRAL, Constants

from tools import style

sys.path.remove(str(ROOT / "03_ddp"))  # where other chapters have files of the same names

# --- beside published runs ---

FITTED = ["NVIDIA dgxh100_ngc23.04_mxnet", "NVIDIA dgxh100_n8_ngc23.04_mxnet"]
PREDICTED = ["NVIDIA dgxh100_n64_ngc23.04_mxnet", "NVIDIA dgxh100_n96_ngc23.04_mxnet",
             "NVIDIA_CoreWeave coreweave_hgxh100_n448_ngc23.04_mxnet"]
GRADIENTS = 51_114_064  # bytes of ResNet-50's in half precision (assumed): one buffer of Horovod's


def mlperf(constants: Constants = CENTRAL) -> pd.DataFrame:
    """MLPerf's ResNet-50 on NVIDIA's H100 systems (rows: GPUs): images/s published, predicted, and by one flat ring.

    The FITTED systems give what a GPU computes: their step less the all-reduce and the stragglers, a line in the images
    of a GPU. All gradients fit into one buffer, which is full when backward ends, so nothing is hidden.
    """
    runs = pd.read_csv(RECORDS / "mlperf_v3.0_resnet50.csv").set_index("system").loc[FITTED + PREDICTED]
    images, step = runs.global_batch / runs.gpus, runs.global_batch / runs.images_per_second
    fabric = at_scale.links_of(constants)
    late = np.array([1 + constants.jitter * cost_model.slowest(gpus) for gpus in runs.gpus])
    shown = np.array([at_scale.all_reduce_seconds(GRADIENTS, gpus, fabric) for gpus in runs.gpus])
    rate, gpu_rate = (1e9 * GIVEN[name] for name in
                      ("rate of a node's network cards", "rate of a GPU's links in the node"))
    ring = np.array([cost_model.all_reduce_seconds(GRADIENTS, cost_model.Cluster(nodes, 8, rate, gpu_rate, "ring"),
                                                   constants) for nodes in runs.nodes])
    found = {"images a GPU": images, "published": runs.images_per_second}
    for name, reduced in (("predicted", shown), ("flat ring", ring)):
        slope, start = np.polyfit(images[FITTED], ((step - reduced) / late)[FITTED], 1)
        found[name] = runs.global_batch / ((start + slope * images) * late + reduced)
    return pd.DataFrame(found).set_index(runs.gpus)


def published() -> str:
    """The table of mlperf()."""
    table = mlperf().rename_axis("GPUs").reset_index()
    for name in "predicted", "flat ring":
        error = (table[name] / table["published"] - 1).map("{:+.1%}".format)
        table[name] = error.where(table.index >= len(FITTED), "fitted")
    formats = {"GPUs": "{:,}".format, "images a GPU": "{:.0f}".format, "published": "{:,.0f}".format}
    names = {"published": "images/s published", "flat ring": "a flat ring of all GPUs"}
    return table.to_string(index=False, formatters=formats, header=[names.get(name, name) for name in table])


def goodput(gpus: int, hours: float, checkpoint: float) -> float:
    """The share of the time in steps that count, at Daly's interval; hours: between failures of one GPU."""
    mtbf = HOUR * hours / gpus
    interval = at_scale.daly(checkpoint, mtbf)
    return at_scale.time_shares(interval, checkpoint, MODEL_7B.restart, mtbf)["goodput"]


def failures() -> str:
    """Goodput by GPUs and their failures (rows), and by checkpoints (columns)."""
    llama, rows = GIVEN["time between failures of a GPU"], []
    jobs = [(1024, 7.9, "2410.21680"), (16384, 1.8, "2410.21680, projected"),  # Kokolis et al.
            (10000, llama / 10000, "Llama 3"), (16384, llama / 16384, "Llama 3: above 90 % published")]
    for gpus, hours, source in jobs:
        row = {"GPUs": f"{gpus:,}", "a failure every": f"{hours:.2f} h", "as in": source}
        for wait in GIVEN["a checkpoint that all wait for"], GIVEN["one that is written meanwhile"]:
            row[f"checkpoint {wait} s"] = f"{goodput(gpus, gpus * hours, wait):.1%}"
        rows.append(row)
    return pd.DataFrame(rows).to_string(index=False)


# --- beside the lab of submit/lab.sh ---

BURST = 32 * 1024  # bytes that a link of submit/lab.sh lets pass at once: such messages do not show it


def lab(rows: Iterable[dict], burst: int = 0) -> tuple[Link, dict[tuple[int, int], float]]:
    """(the link, its relative errors by nodes and bytes), from rows of nodes, bytes and seconds, one rank a node.

    alpha and beta are fitted to two nodes, to messages of more than `burst` bytes; what more nodes take is predicted.
    Of repeats the median counts.
    """
    times = pd.DataFrame(list(rows)).query("nodes > 1").groupby(["nodes", "bytes"]).seconds.median()
    link = at_scale.fit_link(times.reset_index().query("nodes == 2 and bytes > 2 * @burst").to_dict("records"))
    fabric = at_scale.Fabric(1, link, link, "ring")  # as gloo's
    return link, {(nodes, size): at_scale.all_reduce_seconds(size, nodes, fabric) / seconds - 1
                  for (nodes, size), seconds in times.items()}


# --- the figure ---

def draw_shares(axis: Axes) -> None:
    """Where the GPUs' time goes, from 8 to 10,000 of them."""
    nodes = [*range(1, 63), *range(63, 1251, 4)]  # of 8 GPUs; the axis stretches the few
    rows = pd.DataFrame([at_scale.predict(8 * count, MODEL_7B, H100) for count in nodes])
    axis.stackplot(rows.gpus, *(rows[name] for name in style.TIME), colors=style.TIME.values())
    late = rows.step * (rows.useful + rows.stragglers) / rows.goodput
    first = rows.gpus[rows.all_reduce > CENTRAL.backward * late].min()
    words = f"from some {round(first, -2):,} on\nthe all-reduce outlasts\nbackward"
    axis.annotate(words, (first, 0.82), (16, 0.33), arrowprops={"arrowstyle": "-", "color": style.MEASURED})
    axis.set(title="Where the time of the GPUs goes", xlabel="GPUs", xscale="log", xlim=(8, 10000), ylim=(0, 1))
    axis.set_xticks([10, 100, 1000, 10000], ["10", "100", "1,000", "10,000"])
    axis.yaxis.set_major_formatter(PercentFormatter(1))


def draw_intervals(axis: Axes) -> None:
    """Goodput over the time between checkpoints, of a few numbers of GPUs; dots are at Daly's interval."""
    intervals = 60 * np.geomspace(2, 1440, 200)
    for gpus in (100, 1000, 10000):
        mtbf = MODEL_7B.gpu_mtbf / gpus
        best = at_scale.daly(MODEL_7B.checkpoint, mtbf)
        curve, (top,) = ([at_scale.time_shares(interval, MODEL_7B.checkpoint, MODEL_7B.restart, mtbf)["goodput"]
                          for interval in chosen] for chosen in (intervals, [best]))
        axis.plot(intervals / 60, curve, color=style.TIME["failures"])
        axis.plot(best / 60, top, "o", color=style.MEASURED, zorder=3, clip_on=False)
        axis.text(1700, curve[-1], f"{gpus:,}" + " GPUs" * (gpus == 100), va="center")
    axis.set(title="What failures leave of it", xlabel="work between checkpoints", xscale="log", xlim=(2, 23000),
             ylim=(0, 1))
    axis.set_xticks([10, 60, 600], ["10 min", "1 h", "10 h"])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(PercentFormatter(1))


def draw() -> style.Picture:
    """The figure of 03_ddp/AT_SCALE.md."""
    figure, axes = style.picture(5.2, 1, 2)
    draw_shares(axes[0])
    draw_intervals(axes[1])
    most = at_scale.predict(10000, MODEL_7B, H100)
    entries = {name: Patch(color=color) for name, color in style.TIME.items()}
    entries["Daly's interval"] = axes[1].lines[-1]
    style.head(figure, f"On paper: of the time of 10,000 GPUs {most['useful']:.0%} is useful", entries)
    style.foot(figure, f"Computed, not measured: {GIVEN['parameters']} billion parameters, at most {MODEL_7B.batch:,} "
               f"tokens a GPU and {MODEL_7B.largest_batch / 1e6:.0f} million in all; all wait "
               f"{MODEL_7B.checkpoint:.0f} s for a checkpoint")
    return figure


TABLES = {"assumed": at_scale.assumed, "table": at_scale.table, "published": published, "failures": failures}

if __name__ == "__main__":
    print(published(), failures(), sep="\n\n")
