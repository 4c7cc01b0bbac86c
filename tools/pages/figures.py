"""Draw the figures of the READMEs into assets/figures/: those of drawings.py, and those of the records."""

import sys

import pandas
import sweep
from matplotlib.figure import Figure
from records import FIGURES as FOLDER
from records import Unpublished, published

from tools.measuring import demo, reading
from tools.measuring.zero import ROLES, total
from tools.pages.drawings import ABSENT, DRAWINGS

CHAPTERS = {"01_single_node": ("one process", "#000000"), "02_horovod/pytorch": ("Horovod", "#D55E00"),
            "03_ddp": ("DDP", "#0072B2"), "04_deepspeed": ("DeepSpeed", "#009E73")}


def zero():
    """What a rank of chapter 5 holds in bf16, bytes a parameter by stage and ranks: counted, and the formula as a line.

    From assets/records/zero.jsonl, which tools/measuring/zero.py writes.
    """
    records = published("zero.jsonl")
    records = [found for found in records if found["precision"] == "bf16" and found["chapter"] == "05_zero"]
    colors = dict(zip(ROLES, ("#56B4E9", "#E69F00", "#009E73", "#CC79A7")))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, ranks in zip(figure.subplots(1, 3, sharey=True), (1, 2, 4)):
        for found in (found for found in records if found["ranks"] == ranks):
            counted, foot = max(found["memory"], key=total), 0
            for role in ROLES:
                axis.bar(found["stage"], counted[role] / found["parameters"], 0.7, foot, color=colors[role],
                         label=role if found["stage"] == 0 else None)
                foot += counted[role] / found["parameters"]
            expected = total(found["memory_formula"]) / found["parameters"]
            axis.plot([found["stage"] - 0.45, found["stage"] + 0.45], [expected] * 2, color="black", lw=1.5,
                      label="formula" if found["stage"] == 0 else None)
            axis.text(found["stage"], foot + 0.2, f"{foot:.2f}", ha="center", fontsize=9)
        axis.set(title=f"{ranks} rank{'s' * (ranks > 1)}", xlabel="stage", xticks=range(4), ylim=(0, 18))
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("bytes a parameter")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"What a rank holds between backward and optimizer step: bf16, {records[0]['parameters']:,} "
                    "parameters, counted on a CPU", fontsize=10)
    return figure


def measured(name):
    """The records of assets/records/NAME.jsonl, their summary by sweep.py, and where they are from, as a line."""
    records = pandas.DataFrame(published(f"{name}.jsonl"))
    first, runs = records.iloc[0], records.groupby(["chapter", "ranks", "batch"]).size()
    return records, sweep.summary(records), (
        f"{first['model']}, {first['image_size']}x{first['image_size']} pixels, {first['precision']}; {first['host']}: "
        f"{first['processor']}, {first['cpus']} cores, {first['device'].upper()}; median, least and most of "
        f"{' or '.join(map(str, sorted(set(runs))))} runs of {first['steps'] - 5} timed steps")


def points(axis, rows, column, **style):
    """A line through the medians over a column, with bars from the least to the most."""
    axis.errorbar(rows[column], rows["median"], yerr=[rows["median"] - rows["least"], rows["most"] - rows["median"]],
                  fmt="o-", capsize=3, **style)


def batch_size():
    """Throughput of one rank by batch size. From assets/records/batch.jsonl, which submit/sweep.py writes."""
    _, found, where = measured("batch")
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    for chapter, rows in found.groupby("chapter"):
        points(axis, rows, "batch", label=CHAPTERS[chapter][0], color=CHAPTERS[chapter][1])
    axis.set(xscale="log", xlabel="batch size", ylabel="images/s", ylim=(0, None))
    axis.set_xticks(sorted(found["batch"].unique()), sorted(found["batch"].unique()), minor=False)
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(where.replace("; median", ";\nmedian"), fontsize=10)
    return figure


def scaling():
    """Weak and strong scaling of DDP, Horovod and DeepSpeed. From weak.jsonl and strong.jsonl, of sweep.py."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axis, (name, title) in zip(figure.subplots(1, 2), (("weak", "Weak scaling: {} images a rank"),
                                                           ("strong", "Strong scaling: {} images on all ranks"))):
        records, found, where = measured(name)
        cores = records["cpus"].iloc[0] if records["device"].iloc[0] == "cpu" else found["ranks"].max()
        ranks = sorted(found["ranks"].unique())
        axis.plot(ranks, [found[found["ranks"] == ranks[0]]["median"].mean() * n / ranks[0] for n in ranks],
                  ls="--", color="grey", label="ideal: in proportion to the ranks")
        for number, (chapter, rows) in enumerate(found.groupby("chapter")):
            label, color = CHAPTERS[chapter]
            beside = rows.assign(ranks=rows["ranks"] + 0.05 * (number - 1))  # or the bars would hide each other
            points(axis, beside, "ranks", label=label, color=color)
        if ranks[-1] > cores:
            axis.axvspan(cores + 0.5, ranks[-1] + 0.3, color=ABSENT, zorder=0, label="more ranks than cores")
        axis.set(title=title.format(found["batch"].iloc[0]), xlabel="ranks", ylabel="images/s", xticks=ranks,
                 ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(where, fontsize=10)
    return figure


def of_demo():
    return demo.draw(pandas.DataFrame(published("demo.jsonl")))


def of_reading():
    return reading.draw(pandas.DataFrame(published("read_data.jsonl")))


FIGURES = {f"{draw.__name__}.png": draw for draw in (*DRAWINGS, zero, batch_size, scaling)}
FIGURES |= {"demo.png": of_demo, "read_data.png": of_reading}


def main() -> None:
    """Save every figure into assets/figures/."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        try:
            draw().savefig(FOLDER / name, dpi=150)
        except Unpublished as problem:
            sys.exit(f"{name}: {problem}")


if __name__ == "__main__":
    main()
