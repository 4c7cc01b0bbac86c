"""What 01_single_node/batch_size.ipynb draws, reads and trains. What it computes stands in its cells.

A rate is the learning rate that SGD with momentum 0.9 is given, not main.py's --lr for 256 images. Steps to the target
are the median over the seeds, infinite where most of them end without it. `rules`: by name, rule(rate, base, batch) is
the rate for a batch that the rule makes of that for the base.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from math import inf, isfinite
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch, Rectangle
from records import ROOT, published
from torch.nn.functional import cross_entropy

sys.path.append(str(ROOT / "01_single_node"))
import workshop

import main as chapter

from tools.style import ABSENT, IDEAL, MEASURED, PREDICTED, RULES, Picture, head, picture

IMAGES = 1437  # digits to train with


# What the notebook reads and trains

def throughput() -> pd.DataFrame:
    """Images/s of the sweep: a row a repeat, a column a batch size; repeats without a first run have gaps."""
    return pd.DataFrame(published("batch.jsonl")).pivot(index="repeat", columns="batch", values="images_per_second")


def searched() -> pd.DataFrame:
    """The search: a row a batch and rate, with the steps of each seed, infinite without the target, and the median."""
    found = pd.DataFrame(published("steps_to_target.jsonl"))
    found["seeds"] = [[inf if steps is None else steps for steps in row] for row in found.steps]
    for name, of in ("steps", statistics.median), ("least", min), ("most", max):
        found[name] = found.seeds.map(of)
    return found[["batch", "rate", "steps", "least", "most", "seeds", "limit"]]


@cache
def train(*flags: object) -> float:
    """The test accuracy of main.py with these flags, in this process; 0 where the loss does not stay finite."""
    before = sys.argv
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        sys.argv = ["main.py", "--device", "cpu", "--results", f"{folder}/record", *map(str, flags)]
        try:
            with redirect_stdout(nowhere):
                chapter.main()
        except SystemExit as end:
            if "the loss became" not in str(end):
                raise
            return 0.0
        finally:
            sys.argv = before
        return json.loads(Path(folder, "record").read_text())["test_accuracy"]


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The training images as main.py standardises them, and their labels."""
    size = SimpleNamespace(dataset="digits", batch_size=64, global_batch_size=64)
    images, labels = map(torch.tensor, workshop.load_data(size)[0])
    deviation, center = torch.std_mean(images[:256].float())
    return (images - center) / deviation, labels


def network(epochs: int) -> torch.nn.Module:
    """The network that main.py builds, after so many epochs of its training."""
    torch.manual_seed(0)
    model = chapter.build_model("cnn", digits()[0])
    if epochs:
        with tempfile.TemporaryDirectory() as folder:
            train("--epochs", epochs, "--checkpoint", f"{folder}/checkpoint")
            model.load_state_dict(torch.load(f"{folder}/checkpoint")["model"])
    return model


def step_seconds(batches: list[int], steps: int = 15) -> pd.Series:
    """Seconds of a step on one thread of this machine, now: the processor's, which other programs do not lengthen much.

    Forward, backward and update; no loading and no test. The median of some steps, of all batch sizes in turn.
    """
    images, labels = digits()
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seconds = {batch: [] for batch in batches}
    for _ in range(steps):
        for batch in batches:
            started = time.process_time()
            optimizer.zero_grad()
            cross_entropy(model(images[:batch]), labels[:batch]).backward()
            optimizer.step()
            seconds[batch].append(time.process_time() - started)
    return pd.DataFrame(seconds).median()


# Figures

def by_batch(axis: Axes, batches: list, **labels: object) -> None:
    """A logarithmic axis of batch sizes, each of them named."""
    axis.set(xscale="log", xlabel="batch size", **labels)
    axis.set_xticks(batches, batches)
    axis.minorticks_off()


def plain_numbers(axis: Axes, values: list) -> None:
    """These numbers along a logarithmic axis of y."""
    axis.set_yscale("log")
    axis.set_yticks(values, [f"{value:g}" for value in values])
    axis.minorticks_off()


def draw_throughput(speeds: pd.DataFrame, gains: pd.DataFrame) -> Picture:
    figure, axes = picture(3.9, 1, 2, title="ResNet-18 on one CPU core: a dot is a run, a bar the median")
    for axis, values, labels in ((axes[0], speeds, ("batch size", "images/s")),
                                 (axes[1], gains, ("to a batch of", "gain by doubling, percent"))):
        places = np.arange(len(values.columns))
        axis.plot(places, values.T, "o", color=IDEAL)
        axis.plot(places, values.median(), "_", color=MEASURED, markersize=30, markeredgewidth=3)
        axis.set(xlabel=labels[0], ylabel=labels[1], xlim=(-0.5, len(places) - 0.5))
        axis.set_xticks(places, [f"{batch:,}" for batch in values])
    axes[0].set_ylim(0, 1.05 * speeds.max().max())
    axes[1].axhline(0, color=MEASURED, linewidth=1)
    return figure


def draw_steps(best: pd.DataFrame) -> Picture:
    """Steps and epochs to the target by batch size, with what perfect scaling would give."""
    figure, (left, right) = picture(3.9, 1, 2)
    batches = best.index
    epochs = best[["steps", "least", "most"]].mul(batches, axis="index") / IMAGES
    ideal, = left.plot(batches, best.steps.iloc[0] * batches[0] / batches, "--", color=IDEAL)
    right.axhline(epochs.steps.iloc[0], linestyle="--", color=IDEAL)
    for axis, values in (left, best), (right, epochs):
        reached = axis.errorbar(batches, values.steps, [values.steps - values.least, values.most - values.steps],
                                fmt="o-", capsize=5, color=MEASURED)
    by_batch(left, batches, ylabel="steps")
    by_batch(right, batches, ylabel="epochs")
    plain_numbers(left, [5, 10, 20, 50, 100, 200])
    plain_numbers(right, [1, 2, 5, 10, 20])
    head(figure, "To 95 % test accuracy, each batch with its best rate",
         {"median, least and most of 5 seeds": reached, "perfect scaling": ideal})
    return figure


def draw_noise(steps: pd.Series, fewest: float, bend: float, scales: dict[int, float]) -> Picture:
    """Left the variance of a batch meets |G|^2 at the noise scales, by epochs; right the law of the steps."""
    figure, (left, right) = picture(4.2, 1, 2)
    sizes = np.geomspace(steps.index[0], steps.index[-1])
    left.axhline(1, linestyle="--", color=IDEAL)
    for (epochs, scale), shade in zip(scales.items(), (0.4, 0.6, 0.8, 1)):
        left.plot(sizes, scale / sizes, color=PREDICTED, alpha=shade)
        left.plot([scale], [1], "s", color=PREDICTED, alpha=shade, label=f"{epochs} epochs: {scale:.0f}")
    by_batch(left, steps.index, ylabel="variance / |G|\u00b2")
    plain_numbers(left, [0.1, 1, 10])
    left.set_ylim(0.006, 40)
    left.legend(loc="lower left", title="noise scale after", alignment="left", handletextpad=0, borderpad=0)

    band = right.axvspan(min(scales.values()), max(scales.values()), color=ABSENT, zorder=0)
    dots, = right.plot(steps, "o", color=MEASURED)
    curve, = right.plot(sizes, fewest * (1 + bend / sizes), color=PREDICTED)
    right.plot(sizes, fewest * bend / sizes, "--", color=IDEAL)
    right.axhline(fewest, linestyle="--", color=IDEAL)
    right.plot([bend], [fewest], "s", color=PREDICTED, markersize=11)
    right.annotate(f"bend: {bend:.0f}", (bend, fewest), (-10, -8), textcoords="offset points", va="top", ha="right",
                   color=PREDICTED)
    by_batch(right, steps.index, ylabel="steps to 95 %")
    plain_numbers(right, [20, 50, 100, 200])
    right.set_ylim(fewest / 2, 1.2 * steps.max())
    head(figure, "Variance of a batch's gradient; steps to 95 %",
         {"records": dots, "law of McCandlish et al.": curve, "noise scales": band})
    return figure


def draw_rates(found: pd.DataFrame, best: pd.DataFrame, rules: dict[str, Callable], base: int) -> Picture:
    """Steps to the target for all batches and rates that were tried, with the ways of the rules from the base."""
    figure, axis = picture(4.4)
    steps = found.pivot(index="rate", columns="batch", values="steps")
    batches, rates = list(steps), list(steps.index)
    finite = steps.replace(inf, np.nan)
    shades = LogNorm(finite.min().min() / 7, finite.max().max())  # no darker than text on it can be read
    axis.imshow(finite, cmap="Greys_r", norm=shades, aspect="auto", origin="lower")
    entries = {}
    for name, rule in rules.items():
        way = {place: rule(best.rate[base], base, batch) for place, batch in enumerate(batches) if batch >= base}
        axis.plot(*zip(*((place, rates.index(rate)) for place, rate in way.items() if rate in rates)),
                  color=RULES[name], linewidth=14, alpha=0.45)
        entries[name] = Patch(color=RULES[name], alpha=0.45)
    for row in found.itertuples():
        text = f"{row.steps:.0f}" if isfinite(row.steps) else f"> {row.limit:,}"
        axis.text(batches.index(row.batch), rates.index(row.rate), text, ha="center", va="center")
    for place, rate in enumerate(best.rate):
        entries["best rate"] = axis.add_patch(Rectangle((place - 0.45, rates.index(rate) - 0.45), 0.9, 0.9, fill=False,
                                                        linewidth=3, edgecolor=RULES["best rate"]))
    axis.set(xlabel="batch size", ylabel="learning rate")
    axis.set_xticks(range(len(batches)), batches)
    axis.set_yticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    head(figure, f"Steps to 95 %, median of 5 seeds; the rules begin at batch {base}", entries)
    return figure


def draw_rules(found: pd.DataFrame, best: pd.DataFrame, rules: dict[str, Callable], base: int) -> Picture:
    """Steps to the target by the rules and by the best rate, for the base and larger batches."""
    figure, axis = picture(3.9)
    steps, never = found.set_index(["batch", "rate"]).steps, 1000  # where "not reached" stands
    larger = best.steps.loc[base:]
    entries = {"best rate": axis.plot(larger, "o-", color=RULES["best rate"], linewidth=9, alpha=0.25)[0]}
    for name, rule in rules.items():
        rates = {batch: rule(best.rate[base], base, batch) for batch in larger.index}
        values = pd.Series({batch: steps[batch, rate] for batch, rate in rates.items() if (batch, rate) in steps.index})
        entries[name], = axis.plot(values.replace(inf, np.nan), "o-", color=RULES[name])
        broken = values.index[values == inf]
        axis.plot(broken, [never] * len(broken), "x", color=RULES[name], markersize=14, markeredgewidth=3)
    axis.axhline(never, color=IDEAL, linewidth=1)
    by_batch(axis, best.index, ylabel="steps to 95 %", xlim=(7, 590), ylim=(20, 1.3 * never))
    plain_numbers(axis, [20, 50, 100, 200, never])
    axis.set_yticks([20, 50, 100, 200, never], ["20", "50", "100", "200", "not\nreached"])
    head(figure, f"The best rate of batch {base}, {best.rate[base]:g}, and what larger batches take", entries)
    return figure


def draw_compared(trained: pd.DataFrame) -> Picture:
    """Test accuracies by batch and rule: median, least and most of the seeds."""
    figure, axis = picture(3.9)
    entries = {}
    for (rule, runs), shift in zip(trained.groupby("rule", sort=False), (0.97, 1.03)):
        found = runs.groupby("batch").accuracy.agg(["median", "min", "max"])
        entries[rule] = axis.errorbar(found.index * shift, found["median"], capsize=5, fmt="o-", color=RULES[rule],
                                      yerr=[found["median"] - found["min"], found["max"] - found["median"]])
    entries["guessing"] = axis.axhline(0.1, linestyle="--", color=IDEAL)
    by_batch(axis, sorted(trained.batch.unique()), ylabel="test accuracy", ylim=(0, 1.03))
    head(figure, "main.py, now: 4 epochs from the rate of batch 8; three seeds", entries)
    return figure


def draw_times(seconds: Callable, batches: list[int], ranks: int) -> Picture:
    """Time to the target, seconds(batch, ranks), on so many ranks, and on one; a ring marks the least."""
    figure, axis = picture(3.9)
    entries = {}
    for number, color in {1: IDEAL, ranks: MEASURED}.items():
        found = pd.Series({batch: seconds(batch, number) for batch in batches if batch // number >= batches[0]})
        entries[f"{number} rank{'s' * (number > 1)}"], = axis.plot(found, "o-", color=color)
        chosen, least = found.idxmin(), found.min()
        entries["the least"], = axis.plot([chosen], [least], "o", color=PREDICTED, markersize=18, fillstyle="none",
                                          markeredgewidth=3, linestyle="none")
        axis.annotate(f"batch {chosen}: {least:.2g} s", (chosen, least), (0, -16), textcoords="offset points",
                      ha="center", va="top", color=PREDICTED)
    low, high = seconds(128, 8) / 3, 1.3 * max(seconds(batch, 1) for batch in batches)
    by_batch(axis, batches, ylabel="seconds to 95 %", xlim=(7, 590))
    plain_numbers(axis, [tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if low < tick < high])
    axis.set_ylim(low, high)
    head(figure, "Steps of the records \u00d7 seconds of a step now; communication is free", entries)
    return figure


def draw_drawn(measured: dict[int, float], formula: Callable, single: float) -> Picture:
    figure, axis = picture(3.9)
    sizes = list(measured)
    dots, = axis.plot(sizes, measured.values(), "o", color=MEASURED)
    curve, = axis.plot(sizes, [formula(size) for size in sizes], color=PREDICTED)
    alone, = axis.plot(sizes, [single / size for size in sizes], "--", color=IDEAL)
    by_batch(axis, sizes, yscale="log", ylabel="E |$g_B$ \u2013 G|\u00b2")
    head(figure, "Batches drawn without replacement, after an epoch",
         {"measured": dots, "formula": curve, "1/B alone": alone})
    return figure
