"""What 01_single_node/batch_size.ipynb computes, draws and says: throughput, steps to a target, noise, rules and time.

A rate is the learning rate that SGD with momentum 0.9 is given, not main.py's --lr for 256 images. Steps to the target
are the median over the seeds, infinite where most of them end without it.
"""

import json
import os
import statistics
import sys
import tempfile
import time
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
import main as chapter

import workshop
from tools.pages.style import ABSENT, IDEAL, MEASURED, PREDICTED, RULES, Picture, head, picture

IMAGES = 1437  # digits to train with
LINEAR = 256  # images that main.py's --lr is for
RANKS = (1, 2, 4, 8)
ORDER = 10  # numbers are of the same order while they are less than this factor apart
CLOSE = 1.25  # a rule keeps up while it takes at most so many times the steps of the best rate


def by_batch(axis: Axes, batches: list, **labels: object) -> None:
    """A logarithmic axis of batch sizes, each of them named."""
    axis.set(xscale="log", xlabel="batch size", **labels)
    axis.set_xticks(batches, [f"{batch}" for batch in batches])
    axis.minorticks_off()


def plain_numbers(axis: Axes, values: list) -> None:
    """These numbers along a logarithmic axis of y."""
    axis.set_yscale("log")
    axis.set_yticks(values, [f"{value:g}" for value in values])
    axis.minorticks_off()


# --- throughput ---

def throughput() -> pd.DataFrame:
    """Images/s of the sweep: a row a repeat, a column a batch size; repeats without a first run have gaps."""
    records = pd.DataFrame(published("batch.jsonl"))
    return records.pivot(index="repeat", columns="batch", values="images_per_second")


def gains(speeds: pd.DataFrame) -> pd.DataFrame:
    """Percent that each doubling of the batch brings, within a repeat, whose runs follow one another."""
    return (100 * (speeds / speeds.shift(axis="columns") - 1)).iloc[:, 1:]


def draw_throughput(speeds: pd.DataFrame) -> Picture:
    figure, axes = picture(3.9, 1, 2, title="ResNet-18 on one CPU core: a dot is a run, a bar the median")
    won = gains(speeds)
    for axis, values, label in (axes[0], speeds, "images/s"), (axes[1], won, "gain by doubling, percent"):
        places = np.arange(len(values.columns))
        axis.plot(places, values.T, "o", color=IDEAL)
        axis.plot(places, values.median(), "_", color=MEASURED, markersize=30, markeredgewidth=3)
        axis.set(ylabel=label, xlim=(-0.5, len(places) - 0.5))
    axes[0].set(ylim=(0, 1.05 * speeds.max().max()), xlabel="batch size")
    axes[0].set_xticks(range(len(speeds.columns)), [f"{batch:,}" for batch in speeds])
    axes[1].axhline(0, color=MEASURED, linewidth=1)
    axes[1].set(xlabel="to a batch of")
    axes[1].set_xticks(range(len(won.columns)), [f"{batch:,}" for batch in won])
    return figure


def on_throughput(speeds: pd.DataFrame) -> str:
    """Which doublings gain, or lose, in every repeat."""
    won = gains(speeds)
    lines = {"all repeats gain to": [], "to": [], "all repeats lose to": []}
    for batch in won:
        values = won[batch].dropna()
        start = "all repeats gain to" if values.min() > 0 else "all repeats lose to" if values.max() < 0 else "to"
        lines[start].append(f"{batch:,} ({values.median():+.0f} %, {values.min():+.0f} to {values.max():+.0f} %)")
    ends = {"to": " no gain can be told, for the repeats differ in sign"}
    said = [f"{start} {' and '.join(found)}{ends.get(start, '')}" for start, found in lines.items() if found]
    runs = f"The records hold {speeds.count().sum()} of {speeds.size} runs, each of 30 timed steps"
    return f"{runs}: {'; '.join(said)}."


# --- steps to the target ---

def searched() -> pd.DataFrame:
    """The records of the search: a row a batch and rate, with the steps of each seed, infinite without the target."""
    found = pd.DataFrame(published("steps_to_target.jsonl"))
    found["steps"] = [[inf if steps is None else steps for steps in row] for row in found["steps"]]
    return found


def medians(found: pd.DataFrame) -> pd.DataFrame:
    """Median steps to the target: a row a rate, a column a batch; NaN where it was not tried."""
    steps = found.assign(median=[statistics.median(row) for row in found["steps"]])
    return steps.pivot(index="rate", columns="batch", values="median")


def best(found: pd.DataFrame) -> pd.DataFrame:
    """The rate with the fewest median steps for each batch: steps, least and most of the seeds, and epochs."""
    rates = medians(found).idxmin()
    rows = [found[(found.batch == batch) & (found.rate == rate)].iloc[0] for batch, rate in rates.items()]
    steps = [statistics.median(row.steps) for row in rows]
    return pd.DataFrame({"rate": list(rates), "steps": steps, "least": [min(row.steps) for row in rows],
                         "most": [max(row.steps) for row in rows],
                         "epochs": [n * batch / IMAGES for n, batch in zip(steps, rates.index)]}, index=rates.index)


def fit(steps: pd.Series) -> tuple[float, float]:
    """Fewest steps and critical batch of McCandlish's law, steps = fewest * (1 + critical / batch).

    Least squares of the relative errors. The index of `steps` is the batch size.
    """
    batches, values = np.array(steps.index, float), np.array(steps, float)
    terms = np.stack([1 / values, 1 / (values * batches)], axis=1)
    fewest, product = np.linalg.lstsq(terms, np.ones(len(values)), rcond=None)[0]
    return fewest, product / fewest


def refitted(found: pd.DataFrame, draws: int = 1000) -> tuple[float, float]:
    """The critical batch again and again, each time from seeds drawn with replacement: where 95 % of them lie."""
    seeds = {batch: seeds_of(found, batch, rate) for batch, rate in best(found).rate.items()}
    drawing = np.random.default_rng(0)
    bends = []
    for _ in range(draws):
        steps = {batch: np.median(drawing.choice(values, len(values))) for batch, values in seeds.items()}
        bends.append(fit(pd.Series(steps))[1])
    return tuple(np.percentile(bends, [2.5, 97.5]))


def law(batch: np.ndarray, fewest: float, critical: float) -> np.ndarray:
    return fewest * (1 + critical / batch)


def draw_steps(top: pd.DataFrame) -> Picture:
    """Steps and epochs to the target by batch size, with what perfect scaling would give."""
    figure, (left, right) = picture(3.9, 1, 2)
    batches, first = list(top.index), top.iloc[0]
    perfect = [first.steps * batches[0] / batch for batch in batches]
    epochs = top[["steps", "least", "most"]].mul(top.index, axis="index") / IMAGES
    ideal, = left.plot(batches, perfect, "--", color=IDEAL)
    right.axhline(first.epochs, linestyle="--", color=IDEAL)
    for axis, values in (left, top), (right, epochs):
        reached = axis.errorbar(batches, values.steps, [values.steps - values.least, values.most - values.steps],
                                fmt="o-", capsize=5, color=MEASURED)
    by_batch(left, batches, ylabel="steps")
    by_batch(right, batches, ylabel="epochs")
    plain_numbers(left, [5, 10, 20, 50, 100, 200])
    plain_numbers(right, [1, 2, 5, 10, 20])
    head(figure, "To 95 % test accuracy, each batch with its best rate",
         {"median, least and most of 5 seeds": reached, "perfect scaling": ideal})
    return figure


def doubled(top: pd.DataFrame) -> pd.Series:
    """By what each doubling of the batch divides the steps: 2 is perfect, 1 is nothing. Its index is the larger."""
    return (top.steps.shift() / top.steps).iloc[1:]


def on_steps(top: pd.DataFrame) -> str:
    """What the first and the last doubling bring, and cost."""
    factors = doubled(top)
    batches = list(top.index)
    said = [f"from {batches[0]} to {batches[1]} by {factors.iloc[0]:.1f}",
            f"from {batches[-2]} to {batches[-1]} by {factors.iloc[-1]:.1f}"]
    return (f"In the records doubling the batch divides the steps {' and '.join(said)} (perfect is 2.0). The epochs "
            f"{'rise' if top.epochs.iloc[-1] > top.epochs.iloc[0] else 'do not rise'}: {top.epochs.iloc[0]:.1f} at "
            f"batch {batches[0]}, {top.epochs.iloc[-1]:.1f} at {batches[-1]}.")


# --- the noise of the gradient ---

def train(*flags: object) -> dict | None:
    """The record of main.py with these flags, in this process; None where the loss does not stay finite."""
    before = sys.argv
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        sys.argv = ["main.py", "--device", "cpu", "--results", f"{folder}/record", *map(str, flags)]
        try:
            with redirect_stdout(nowhere):
                chapter.main()
        except SystemExit as end:
            if "the loss became" not in str(end):
                raise
            return None
        finally:
            sys.argv = before
        return json.loads(Path(folder, "record").read_text())


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The training images as main.py standardises them, and their labels."""
    size = SimpleNamespace(dataset="digits", batch_size=64, global_batch_size=64)
    images, labels = map(torch.tensor, workshop.load_data(size)[0])
    deviation, center = torch.std_mean(images[:256].float())
    return (images - center) / deviation, labels


@cache
def network(epochs: int) -> torch.nn.Module:
    """The network that main.py builds, after so many epochs of its training."""
    torch.manual_seed(0)
    model = chapter.build_model("cnn", digits()[0])
    if epochs:
        with tempfile.TemporaryDirectory() as folder:
            train("--epochs", epochs, "--checkpoint", f"{folder}/checkpoint")
            model.load_state_dict(torch.load(f"{folder}/checkpoint")["model"])
    return model


def gradient(model: torch.nn.Module, chosen: torch.Tensor) -> torch.Tensor:
    """The gradient of the mean loss over the chosen images, as one vector."""
    images, labels = digits()
    loss = cross_entropy(model(images[chosen]), labels[chosen])
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


@cache
def spread(epochs: int) -> tuple[float, float]:
    """|G|^2 of the gradient G of all images, and the mean of |g - G|^2 over the gradients g of single images."""
    model, n = network(epochs), len(digits()[1])
    whole = gradient(model, torch.arange(n))
    away = [(gradient(model, torch.tensor([image])) - whole).square().sum().item() for image in range(n)]
    return whole.square().sum().item(), statistics.mean(away)


@cache
def noise_scale(epochs: int) -> float:
    """tr(Sigma) / |G|^2 of McCandlish et al., in images, after so many epochs of main.py."""
    square, single = spread(epochs)
    return single * IMAGES / (IMAGES - 1) / square


def noise(size: float, single: float, n: int = IMAGES) -> float:
    """The variance E |g_B - G|^2 of a batch drawn without replacement from n; `single`: that of single images."""
    return single / size * (1 - (size - 1) / (n - 1))


def drawn_noise(sizes: list[int], epochs: int, draws: int = 30) -> list[float]:
    """The mean of |g_B - G|^2 over some batches of each size, drawn without replacement."""
    model, n = network(epochs), len(digits()[1])
    whole = gradient(model, torch.arange(n))
    torch.manual_seed(0)
    return [statistics.mean((gradient(model, torch.randperm(n)[:size]) - whole).square().sum().item()
                            for _ in range(draws)) for size in sizes]


def draw_noise(square: float, single: float, top: pd.DataFrame, scales: dict[int, float]) -> Picture:
    """Left the variance of a batch meets |G|^2 at the noise scale; right the law of steps, beside the noise scales."""
    figure, (left, right) = picture(4.2, 1, 2)
    batches = list(top.index)
    sizes = np.geomspace(batches[0], batches[-1])
    scale = single * IMAGES / (IMAGES - 1) / square
    left.plot(sizes, square * scale / sizes, color=MEASURED)
    left.axhline(square, linestyle="--", color=IDEAL)
    left.plot([scale], [square], "s", color=PREDICTED, markersize=11)
    left.annotate(f"noise scale: {scale:.0f}", (scale, square), (6, 10), textcoords="offset points", color=PREDICTED)
    left.annotate("|G|\u00b2, all images", (batches[0], square), (0, -8), textcoords="offset points", va="top")
    left.annotate("variance of a batch", (batches[0], square * scale / batches[0]), (14, 0), textcoords="offset points")
    by_batch(left, batches, ylabel="squared length")
    left.set(yscale="log", yticks=[])
    left.minorticks_off()

    fewest, critical = fit(top.steps)
    band = right.axvspan(min(scales.values()), max(scales.values()), color=ABSENT, zorder=0)
    dots, = right.plot(batches, top.steps, "o", color=MEASURED)
    curve, = right.plot(sizes, law(sizes, fewest, critical), color=PREDICTED)
    right.plot(sizes, fewest * critical / sizes, "--", color=IDEAL)
    right.axhline(fewest, linestyle="--", color=IDEAL)
    right.plot([critical], [fewest], "s", color=PREDICTED, markersize=11)
    right.annotate(f"bend: {critical:.0f}", (critical, fewest), (-10, -8), textcoords="offset points", va="top",
                   ha="right", color=PREDICTED)
    by_batch(right, batches, ylabel="steps to 95 %")
    plain_numbers(right, [20, 50, 100, 200])
    right.set_ylim(fewest / 2, 1.2 * top.steps.max())
    head(figure, "Variance of a batch's gradient after an epoch; steps to 95 %", {
        "records": dots, "law of McCandlish et al.": curve, "noise scales": band})
    return figure


def on_law() -> str:
    """What the law gives for doublings from the bend on."""
    steps = law(np.array([1, 2, 4, 8]), 1, 1)
    factors = [f"{factor:.2f}" for factor in steps[:-1] / steps[1:]]
    return (f"By the law a batch at the bend takes {steps[0]:g} times the fewest steps, and further doublings "
            f"divide the steps by {listed(factors)}.")


def on_bend(found: pd.DataFrame, scales: dict[int, float]) -> str:
    """The bend of the records, with its uncertainty, beside the noise scales of this run."""
    critical, (least, most) = fit(best(found).steps)[1], refitted(found)
    low, high = min(scales.values()), max(scales.values())
    told = ", ".join(f"{scale:.0f} after {epochs}" for epochs, scale in scales.items())
    far = max(high / critical, critical / low)
    text = (f"The bend of the records is at a batch of {critical:.0f} ({least:.0f} to {most:.0f} for 95 % of "
            f"draws of their seeds). The noise scales, computed now, by epochs of training: {told}. ")
    if far >= ORDER:
        return f"{text}The bend is not of their order: one of them is a factor of {far:.0f} away."
    text += f"The bend is of their order, at most a factor of {far:.1f} away"
    if high / low < 2:
        return f"{text}."
    return (f"{text}; they differ by a factor of {high / low:.1f} themselves, so no better agreement than a factor of "
            "two or three is to be expected.")


# --- which rate for another batch ---

def rule_rate(rule: str, base: int, rate: float, batch: int) -> float:
    """The rate for a batch that a rule makes of that for the base."""
    return rate * batch / base if rule == "linear rule" else rate


def tied(found: pd.DataFrame, base: int) -> list[float]:
    """The rates with the fewest median steps at this batch, the lowest first."""
    steps = medians(found)[base]
    return list(steps.index[steps == steps.min()])


def by_rule(found: pd.DataFrame, base: int, rate: float | None = None) -> pd.DataFrame:
    """Median steps for the base and larger batches, from this rate, else the best of the base: a column a rule.

    Infinite: without the target. NaN: the rate was not tried.
    """
    steps, rate = medians(found), rate or best(found).rate[base]
    batches = [batch for batch in steps if batch >= base]
    columns = {"best rate": steps[batches].min()}
    for rule in "linear rule", "constant rate":
        rates = [rule_rate(rule, base, rate, batch) for batch in batches]
        columns[rule] = [steps[batch].get(rate, np.nan) for batch, rate in zip(batches, rates)]
    return pd.DataFrame(columns, index=batches)


def draw_rates(found: pd.DataFrame, base: int) -> Picture:
    """Steps to the target for all batches and rates that were tried, with the ways of two rules from the base."""
    figure, axis = picture(4.4)
    steps, top = medians(found), best(found)
    batches, rates = list(steps), list(steps.index)
    finite, limits = steps.replace(inf, np.nan), found.groupby("batch").limit.first()
    shades = LogNorm(finite.min().min() / 7, finite.max().max())  # no darker than text on it can be read
    axis.imshow(finite, cmap="Greys_r", norm=shades, aspect="auto", origin="lower")
    entries = {}
    start = batches.index(base)
    for rule in "linear rule", "constant rate":
        way = [rule_rate(rule, base, top.rate[base], batch) for batch in batches[start:]]
        rows = [rates.index(rate) for rate in way if rate in rates]
        axis.plot(range(start, start + len(rows)), rows, color=RULES[rule], linewidth=14, alpha=0.45)
        entries[rule] = Patch(color=RULES[rule], alpha=0.45)
    for column, batch in enumerate(batches):
        for row, rate in enumerate(rates):
            value = steps.loc[rate, batch]
            if not np.isnan(value):
                text = f"{value:.0f}" if isfinite(value) else f"> {limits[batch]:,}"
                axis.text(column, row, text, ha="center", va="center")
        chosen = (column - 0.45, rates.index(top.rate[batch]) - 0.45)
        entries["best rate"] = axis.add_patch(Rectangle(chosen, 0.9, 0.9, fill=False, linewidth=3,
                                                        edgecolor=RULES["best rate"]))
    axis.set(xlabel="batch size", ylabel="learning rate")
    axis.set_xticks(range(len(batches)), batches)
    axis.set_yticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    head(figure, f"Steps to 95 %, median of {len(found.steps[0])} seeds; the rules begin at batch {base}", entries)
    return figure


def on_rates(found: pd.DataFrame, base: int) -> str:
    """How to read the figure, how far the linear rule is beside the best rates, and where these no longer rise."""
    rates = best(found).rate.loc[base:]
    beside = [batch for batch, rate in rates.items()
              if 1 / 2 <= rule_rate("linear rule", base, rates[base], batch) / rate <= 2]
    near = "at every batch" if len(beside) == len(rates) else f"at {listed(beside)}"
    flat = next(batch for batch in rates.index if rates.loc[batch:].max() <= 2 * rates.loc[batch:].min())
    low, high = rates.loc[flat:].min(), rates.loc[flat:].max()
    return (f"The darker, the fewer steps. Most seeds do not get there within the steps behind \">\"; empty cells "
            f"were not tried. The linear rule is within a factor of two of the best rate {near}; from {flat} on the "
            f"best rates lie between {low:g} and {high:g}.")


def draw_rules(found: pd.DataFrame, base: int) -> Picture:
    """Steps to the target by the two rules and by the best rate."""
    figure, axis = picture(3.9)
    table = by_rule(found, base)
    never, looks = 1000, {"best rate": {"linewidth": 9, "alpha": 0.25}}  # steps: where "not reached" stands
    entries = {}
    for rule, color in RULES.items():
        values = table[rule].dropna()
        entries[rule], = axis.plot(values.index, values.replace(inf, np.nan), "o-", color=color, **looks.get(rule, {}))
        broken = values.index[values == inf]
        axis.plot(broken, [never] * len(broken), "x", color=color, markersize=14, markeredgewidth=3)
    axis.axhline(never, color=IDEAL, linewidth=1)
    by_batch(axis, list(medians(found)), ylabel="steps to 95 %", xlim=(7, 590), ylim=(20, 1.3 * never))
    plain_numbers(axis, [20, 50, 100, 200, never])
    axis.set_yticks([20, 50, 100, 200, never], ["20", "50", "100", "200", "not\nreached"])
    head(figure, f"The best rate of batch {base}, {best(found).rate[base]:g}, and what larger batches take", entries)
    return figure


def keeps_up(table: pd.DataFrame, rule: str) -> int:
    """The largest batch to which a rule takes at most CLOSE times the steps of the best rate, all the way."""
    last = table.index[0]
    for batch, row in table.iterrows():
        if not row[rule] <= CLOSE * row["best rate"]:
            break
        last = batch
    return last


def apart(one: list, other: list) -> int:
    """-1 where all values of one are below all of the other, 1 where above, 0 where they overlap or are the same."""
    return int(min(one) > max(other)) - int(max(one) < min(other))


def seeds_of(found: pd.DataFrame, batch: int, rate: float) -> list | None:
    """The steps of each seed; None where the rate was not tried."""
    rows = found[(found.batch == batch) & (found.rate == rate)]
    return rows.steps.iloc[0] if len(rows) else None


def versus(found: pd.DataFrame, base: int, rate: float) -> dict[str, list]:
    """Batches by how the linear rule does beside the constant rate, both from this rate of the base."""
    told = {"fewer": [], "overlap": [], "more": [], "never": []}
    for batch in best(found).index:
        linear = seeds_of(found, batch, rule_rate("linear rule", base, rate, batch))
        constant = seeds_of(found, batch, rate)
        if batch > base and linear and constant:
            verdict = {-1: "fewer", 0: "overlap", 1: "more"}[apart(linear, constant)]
            told["never" if statistics.median(linear) == inf else verdict].append(batch)
    return told


def on_rules(found: pd.DataFrame, base: int) -> str:
    """Where the linear rule wins over the constant rate, how far it keeps up with the best, and where it breaks."""
    table, told = by_rule(found, base), versus(found, base, best(found).rate[base])
    words = {"fewer": "every seed takes fewer steps than with the constant rate", "overlap": "the seeds overlap",
             "more": "every seed takes more steps than with the constant rate",
             "never": "most seeds do not reach the target"}
    said = [f"{words[verdict]} at {listed(batches)}" for verdict, batches in told.items() if batches]
    return (f"In the records, by the linear rule from batch {base}, {', '.join(said)}. It stays within "
            f"{100 * (CLOSE - 1):.0f} % of the best rate's steps up to batch {keeps_up(table, 'linear rule')}.")


def on_tie(found: pd.DataFrame, base: int) -> str:
    """What would be said from the highest of the best rates, where some tie; else nothing."""
    rates = tied(found, base)
    lower, higher = rates[0], rates[-1]
    if lower == higher:
        return ""
    ends = [keeps_up(by_rule(found, base, rate), "linear rule") for rate in (lower, higher)]
    text = f"At batch {base} the rates {listed([f'{rate:g}' for rate in rates])} tie; we start from the lowest. "
    wins = versus(found, base, higher)["fewer"]
    won = f"every seed takes fewer steps than with the constant rate at {listed(wins) if wins else 'no batch'}"
    if ends[0] == ends[1]:
        return f"{text}From the highest the rule keeps up as far, and {won}."
    only = " only" if ends[1] < ends[0] else ""
    return (f"{text}From the highest the rule keeps up to batch {ends[1]}{only}, and {won}: how far it carries depends "
            f"on a factor of {higher / lower:g} in its start.")


def on_starts(found: pd.DataFrame, bases: list[int]) -> str:
    """How far the linear rule keeps up from other batches."""
    ends = {base: keeps_up(by_rule(found, base), "linear rule") for base in bases}
    said = [f"from {base} {f'up to {end}' if end > base else 'at no larger one'}" for base, end in ends.items()]
    return f"Started at other batches it stays so close {', '.join(said)}."


def listed(values: object) -> str:
    """8, 16 and 32"""
    *first, last = [value if isinstance(value, str) else f"{value:,}" for value in values]
    return f"{', '.join(first)} and {last}" if first else last


# --- the rules after equal epochs, now ---

def compare(batches: list[int], base: int, rate: float, epochs: int, seeds: range) -> pd.DataFrame:
    """Train with main.py now: test accuracies after equal epochs, 0 where the loss is not finite. A row a run."""
    rows = []
    for batch in batches:
        for seed in seeds:
            for rule in ("linear rule", "constant rate"):
                lr = rule_rate(rule, base, rate, batch) * LINEAR / batch
                if batch == base and rule == "constant rate":
                    rows.append(rows[-1] | {"rule": rule})  # the same training
                    continue
                record = train("--batch-size", batch, "--lr", lr, "--epochs", epochs, "--seed", seed)
                rows.append({"rule": rule, "batch": batch, "accuracy": record["test_accuracy"] if record else 0})
    return pd.DataFrame(rows)


def draw_compared(trained: pd.DataFrame, base: int, rate: float, epochs: int) -> Picture:
    figure, axis = picture(3.9)
    entries = {}
    for rule, shift in ("linear rule", 0.97), ("constant rate", 1.03):
        found = trained[trained.rule == rule].groupby("batch").accuracy.agg(["median", "min", "max"])
        entries[rule] = axis.errorbar(found.index * shift, found["median"], capsize=5, fmt="o-", color=RULES[rule],
                                      yerr=[found["median"] - found["min"], found["max"] - found["median"]])
    entries["guessing"] = axis.axhline(0.1, linestyle="--", color=IDEAL)
    by_batch(axis, sorted(trained.batch.unique()), ylabel="test accuracy", ylim=(0, 1.03))
    head(figure, f"main.py, now: {epochs} epochs from the rate of batch {base}, {rate:g}", entries)
    return figure


def on_compared(trained: pd.DataFrame) -> str:
    """By batch: which rule's accuracies are higher, or whether they overlap."""
    lines = {"linear rule": [], "constant rate": [], "": []}
    for batch, found in trained.groupby("batch"):
        linear, constant = (list(found[found.rule == rule].accuracy) for rule in ("linear rule", "constant rate"))
        if batch != trained.batch.min():  # the base, where both are the same training
            lines[{1: "linear rule", -1: "constant rate", 0: ""}[apart(linear, constant)]].append(batch)
    said = [f"every seed ends higher with the {rule} at batch {listed(batches)}" for rule, batches in lines.items()
            if rule and batches]
    if lines[""]:
        said.append(f"the seeds do not tell the rules apart at {listed(lines[''])}")
    return f"In this run {'; '.join(said)}."


# --- time to the target ---

def step_seconds(batches: list[int], steps: int = 15) -> pd.Series:
    """Seconds of a step on one thread of this machine, now: the processor's, which other programs do not lengthen much.

    Forward, backward and update; no loading and no test. The median of some steps, of all batch sizes in turn.
    """
    images, labels = digits()
    model = chapter.build_model("cnn", images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seconds = {batch: [] for batch in batches}
    for _ in range(steps):
        for batch in batches:
            started = time.process_time()
            optimizer.zero_grad()
            cross_entropy(model(images[:batch]), labels[:batch]).backward()
            optimizer.step()
            seconds[batch].append(time.process_time() - started)
    return pd.Series({batch: statistics.median(values) for batch, values in seconds.items()})


def times(top: pd.DataFrame, seconds: pd.Series, ranks: int) -> pd.Series:
    """Seconds to the target by global batch: steps * seconds of a step on the rank's share; communication is free."""
    return pd.Series({batch: top.steps[batch] * seconds[batch // ranks] for batch in top.index
                      if batch // ranks in seconds.index})


def draw_times(top: pd.DataFrame, seconds: pd.Series, ranks: int) -> Picture:
    """Time to the target on so many ranks, and on one; a ring marks the least."""
    figure, axis = picture(3.9)
    entries = {}
    for number, color in {1: IDEAL, ranks: MEASURED}.items():
        found = times(top, seconds, number)
        entries[f"{number} rank{'s' * (number > 1)}"], = axis.plot(found.index, found, "o-", color=color)
        chosen = found.idxmin()
        entries["the least"], = axis.plot([chosen], [found[chosen]], "o", color=PREDICTED, markersize=18,
                                          fillstyle="none", markeredgewidth=3, linestyle="none")
    one, all_ = times(top, seconds, 1), times(top, seconds, max(RANKS))
    by_batch(axis, list(top.index), ylabel="seconds to 95 %", xlim=(7, 590), ylim=(all_.min() / 1.6, 1.3 * one.max()))
    ticks = [tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if all_.min() / 1.6 < tick < 1.3 * one.max()]
    plain_numbers(axis, ticks)
    head(figure, "Steps of the records \u00d7 seconds of a step now; communication is free", entries)
    return figure


def on_times(top: pd.DataFrame, seconds: pd.Series) -> str:
    """The batch with the least time for each number of ranks; those with the most images/s and the fewest steps."""
    least = {number: times(top, seconds, number) for number in RANKS}
    said = [f"batch {found.idxmin()} on {number} rank{'s' * (number > 1)} ({found.min():.2f} s)"
            for number, found in least.items()]
    speeds = pd.Series(seconds.index, seconds.index) / seconds
    ends = []
    for name, batch in ("fewest steps", top.steps.idxmin()), ("most images a second", speeds.idxmax()):
        longer = least[1][batch] / least[1].min()
        takes = "the least time" if batch == least[1].idxmin() else f"{longer:.1f} times the least time"
        ends.append(f"batch {batch} has the {name} and takes {takes}")
    return f"Now, on this machine, the least time by this model: {', '.join(said)}. On one rank {'; '.join(ends)}."


# --- for reading: warm-up, the formula, LARS ---

def warm_up(rates: tuple, warmups: tuple, seeds: range) -> dict[tuple, list[float]]:
    """Test accuracies of batch 512 after 20 epochs by (rate, epochs of warm-up); 0 where the loss is not finite."""
    ends = {}
    for rate in rates:
        for epochs in warmups:
            flags = "--batch-size", 512, "--epochs", 20, "--lr", rate * LINEAR / 512, "--warmup-epochs", epochs
            done = [train(*flags, "--seed", seed) for seed in seeds]
            ends[rate, epochs] = [record["test_accuracy"] if record else 0 for record in done]
    return ends


def on_warm_up(ends: dict[tuple, list[float]]) -> str:
    """A line a setting, and whether the seeds tell at each rate that warm-up helps."""
    lines = []
    for (rate, epochs), values in ends.items():
        name = f"warm-up over {epochs} epochs" if epochs else "no warm-up"
        lines.append(f"- rate {rate:g}, {name}: {min(values):.2f} to {max(values):.2f}, "
                     f"{statistics.mean(values):.2f} in the mean")
    verdicts = []
    words = {1: "every seed ends higher with warm-up", -1: "every seed ends lower with warm-up",
             0: "the seeds do not tell whether warm-up helps"}
    for rate in dict.fromkeys(rate for rate, _ in ends):
        without, *_, with_it = [values for (other, _), values in sorted(ends.items()) if other == rate]
        verdicts.append(f"At rate {rate:g} {words[apart(with_it, without)]}.")
    return "\n".join([*lines, "", *verdicts])


def draw_drawn(sizes: list[int], measured: list[float], single: float) -> Picture:
    figure, axis = picture(3.9)
    dots, = axis.plot(sizes, measured, "o", color=MEASURED)
    curve, = axis.plot(sizes, [noise(size, single) for size in sizes], color=PREDICTED)
    alone, = axis.plot(sizes, [single / size for size in sizes], "--", color=IDEAL)
    by_batch(axis, sizes, yscale="log", ylabel="E |$g_B$ \u2013 G|\u00b2")
    head(figure, "Batches drawn without replacement, after an epoch", {
        "measured": dots, "formula": curve, "1/B alone": alone})
    return figure


def on_drawn(sizes: list[int], measured: list[float], single: float) -> str:
    """How far the measured variance is from the formula."""
    apart = [abs(value / noise(size, single) - 1) for value, size in zip(measured, sizes)]
    return (f"The measured variance is {100 * max(apart):.0f} % off the formula at most, "
            f"{100 * statistics.median(apart):.0f} % in the median over the batch sizes.")


def layers() -> pd.DataFrame:
    """|w| and |g| of each layer at the start, for the mean loss of all images."""
    images, labels = digits()
    torch.manual_seed(0)
    model = chapter.build_model("cnn", images)
    cross_entropy(model(images), labels).backward()
    found = [layer for layer in model if hasattr(layer, "weight")]
    table = pd.DataFrame({"layer": [type(layer).__name__ for layer in found],
                          "|w|": [layer.weight.norm().item() for layer in found],
                          "|g|": [layer.weight.grad.norm().item() for layer in found]})
    table["|w| / |g|"] = table["|w|"] / table["|g|"]
    return table
