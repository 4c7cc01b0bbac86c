"""Draw the figures of the READMEs into assets/figures/: those of drawings.py, and those of the records."""

import json
import sys

import pandas
import sweep
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from records import FIGURES as FOLDER
from records import RECORDS, Unpublished, published

from tools import style
from tools.measuring import demo, reading
from tools.measuring.zero import ROLES, total
from tools.pages import at_scale, slow_link
from tools.pages.drawings import DRAWINGS


def zero():
    """What a rank of chapter 5 holds in bf16, bytes a parameter by stage and ranks: counted, and the formula as a line.

    From assets/records/zero.jsonl, which tools/measuring/zero.py writes.
    """
    records = [found for found in published("zero.jsonl")
               if found["precision"] == "bf16" and found["chapter"] == "05_zero"]
    figure, axes = style.picture(4.6, 1, 3, sharey=True)
    for axis, ranks in zip(axes, (1, 2, 4)):
        for found in (found for found in records if found["ranks"] == ranks):
            counted, foot = max(found["memory"], key=total), 0
            for role in ROLES:
                axis.bar(found["stage"], counted[role] / found["parameters"], 0.7, foot, color=style.ROLES[role])
                foot += counted[role] / found["parameters"]
            expected = total(found["memory_formula"]) / found["parameters"]
            axis.plot([found["stage"] - 0.45, found["stage"] + 0.45], [expected] * 2, color=style.PREDICTED, lw=2)
            axis.annotate(f"{foot:.3g}", (found["stage"], max(foot, expected)), (0, 5), textcoords="offset points",
                          ha="center")
        axis.set(title=f"{ranks} rank{'s' * (ranks > 1)}", xlabel="stage", xticks=range(4), yticks=range(0, 17, 4),
                 ylim=(0, 18.5))
    axes[0].set_ylabel("bytes a parameter")
    entries = {role: Patch(color=style.ROLES[role]) for role in ROLES}
    entries["formula"] = Line2D([], [], color=style.PREDICTED, lw=2)
    style.head(figure, "What a rank holds between backward and optimizer step", entries)
    style.foot(figure, f"Counted on a CPU, on the rank that holds most: bf16, {records[0]['parameters']:,} parameters")
    return figure


def measured(name):
    """The records of assets/records/NAME.jsonl, their summary by sweep.py, and where they are from, as a line."""
    records = pandas.DataFrame(published(f"{name}.jsonl"))
    first, runs = records.iloc[0], records.groupby(["chapter", "ranks", "batch"]).size()
    return records, sweep.summary(records), (
        f"{first['model']}, {first['image_size']}x{first['image_size']} pixels, {first['precision']}; {first['host']}: "
        f"{first['processor']}, {first['cpus']} cores, {first['device'].upper()}; median, least and most of "
        f"{' or '.join(map(str, sorted(set(runs))))} runs of {first['steps'] - 5} timed steps")


def points(axis, rows, column, **options):
    """A line through the medians over a column, with bars from the least to the most."""
    axis.errorbar(rows[column], rows["median"], yerr=[rows["median"] - rows["least"], rows["most"] - rows["median"]],
                  fmt="o-", capsize=4, **options)


def batch_size():
    """Throughput of one rank by batch size. From assets/records/batch.jsonl, which submit/sweep.py writes."""
    _, found, where = measured("batch")
    (chapter, rows), = found.groupby("chapter")
    best = rows.loc[rows["median"].idxmax()]
    figure, axis = style.picture(4.2, title=f"One rank is fastest at a batch of {best['batch']} images, by the median")
    points(axis, rows, "batch", color=style.LIBRARIES[style.CHAPTERS[chapter]])
    for row in rows.itertuples():
        axis.annotate(f"{row.median:.0f}", (row.batch, row.most), (0, 5), textcoords="offset points", ha="center")
    axis.set_xscale("log", base=2)
    axis.set(xlabel="batch size", ylabel="images/s", ylim=(0, None))
    axis.set_xticks(rows["batch"], rows["batch"])
    style.foot(figure, where)
    return figure


def scaling():
    """Weak and strong scaling of DDP, Horovod and DeepSpeed. From weak.jsonl and strong.jsonl, of sweep.py.

    Above images/s, below efficiency: images/s over ranks times those of one rank.
    """
    figure, axes = style.picture(5.6, 2, 2, sharex=True, sharey="row", height_ratios=(5, 4))
    ideal = {"color": style.IDEAL, "ls": "--", "zorder": 1}
    hollow = {"marker": "o", "ls": "", "markerfacecolor": "white", "markeredgewidth": 2, "zorder": 4}
    entries, notes, fitting, most = {}, {}, [], 0
    for column, (name, title) in enumerate((("weak", "Weak scaling: {} images a rank"),
                                            ("strong", "Strong scaling: {} images in all"))):
        _, found, where = measured(name)
        notes[where] = None
        speed, efficiency = axes[:, column]
        ranks = sorted(found["ranks"].unique())
        one = found[found["ranks"] == ranks[0]]["median"].mean() / ranks[0]
        speed.plot(ranks, [one * number for number in ranks], **ideal)
        efficiency.plot(ranks, [1] * len(ranks), **ideal)
        crowded = found["remarks"].str.contains("more ranks than cores")
        fitting.append(found[~crowded & (found["ranks"] == found[~crowded]["ranks"].max())])
        for number, (chapter, rows) in enumerate(found.groupby("chapter", sort=False)):
            library = style.CHAPTERS[chapter]
            color = style.LIBRARIES[library]
            beside = rows.assign(ranks=rows["ranks"] + 0.07 * (number - 1))  # or the bars would hide each other
            points(speed, beside, "ranks", color=color)
            entries[library], = efficiency.plot(beside["ranks"], beside["efficiency"], "o-", color=color)
            for axis, values in (speed, "median"), (efficiency, "efficiency"):
                axis.plot("ranks", values, data=beside[crowded[rows.index]], color=color, **hollow)
        most = max(most, found["most"].max())
        speed.set_title(title.format(found["batch"].iloc[0]))
        efficiency.set(xlabel="ranks", xticks=ranks)
    axes[0, 0].set(ylabel="images/s", ylim=(0, 1.15 * most))  # what is ideal leaves it
    axes[1, 0].set(ylabel="efficiency", yticks=(0, 0.5, 1), ylim=(0, 1.15))
    entries["ideal"] = Line2D([], [], **ideal)
    entries["more ranks than cores"] = Line2D([], [], color=style.COMMUNICATION, **hollow)
    best = pandas.concat(fitting)
    style.head(figure, f"{best['ranks'].max()} ranks on {best['cpus'].max()} cores: {best['efficiency'].min():.0%} to "
               f"{best['efficiency'].max():.0%} of the ideal", entries)
    style.foot(figure, "\n".join(notes))
    return figure


def trace():
    """Three steps of chapter 1 on a GPU: when the CPU launches them and when the GPU computes them.

    From assets/records/trace_h200.json, which main.py --profile wrote, in short.
    """
    record = json.loads((RECORDS / "trace_h200.json").read_text())
    figure, axis = style.picture(3.2, 1, 1)
    for row, step, start, end in record["steps"]:
        place = ["GPU", "CPU"].index(row)
        color = (style.STEP["backward"], style.STEP["optimizer"], style.TIME["failures"])[int(step) % 3]
        axis.barh(place, (end - start) / 1000, 0.6, start / 1000, color=color)
        axis.annotate(f"step {step}", ((start + end) / 2000, place), ha="center", va="center", color="white")
    axis.set(yticks=[0, 1], yticklabels=["GPU computes", "CPU launches"], xlabel="milliseconds")
    style.head(figure, "The CPU runs ahead, and the GPU never waits", {})
    style.foot(figure, "ResNet-50, 224 pixels, 256 images a batch, TF32, on one NVIDIA H200")
    return figure


FIGURES = {f"{draw.__name__}.png": draw for draw in (*DRAWINGS, zero, batch_size, scaling, trace)} | {
    "demo.png": lambda: demo.draw(published("demo.jsonl")),
    "read_data.png": lambda: reading.draw(pandas.DataFrame(published("read_data.jsonl"))),
    "at_scale.png": at_scale.draw, "slow_link.png": slow_link.draw}


def main() -> None:
    """Save every figure into assets/figures/. Exits with a line where a record is not of a commit."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        try:
            draw().savefig(FOLDER / name, dpi=style.DPI)
        except Unpublished as problem:
            sys.exit(f"{name}: {problem}")
