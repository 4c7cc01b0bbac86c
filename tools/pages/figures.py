"""Draw the pages' figures from records, into assets/figures."""

import json

import pandas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cluster.records import FIGURES as FOLDER
from cluster.records import RECORDS, read_records
from tools import style
from tools.measuring import demo, reading
from tools.measuring.zero import ROLES, total


def zero():
    """Draw a rank's bytes per parameter in chapter 5, bf16, by stage: counted, and by formula."""
    records = [record for record in read_records("zero.jsonl")
               if record["precision"] == "bf16" and record["chapter"] == "05_zero"]
    figure, axes = style.make_figure(4.6, 1, 3, sharey=True)
    for axis, ranks in zip(axes, (1, 2, 4)):
        selected = [record for record in records if record["ranks"] == ranks]
        for record in selected:
            stage, parameters = record["stage"], record["parameters"]
            memory, height = max(record["memory"], key=total), 0
            for role in ROLES:
                size = memory[role] / parameters
                axis.bar(stage, size, 0.7, height, color=style.ROLE_COLORS[role])
                height += size
            expected = total(record["memory_formula"]) / parameters
            paper = 4 + 12 / ranks if stage == 1 and ranks > 1 else expected
            if paper > expected:  # ZeRO's paper keeps other ranks' gradients
                axis.plot([stage - 0.45, stage + 0.45], [paper] * 2, "--", color=style.IDEAL, lw=2)
            axis.plot([stage - 0.45, stage + 0.45], [expected] * 2, color=style.PREDICTED, lw=2)
            axis.annotate(f"{height:.3g}", (stage, height), (0, -6), textcoords="offset points",
                          ha="center", va="top")
        axis.set(title=f"{ranks} rank{'s' * (ranks > 1)}", xlabel="stage", xticks=range(4),
                 yticks=range(0, 17, 4), ylim=(0, 18.5))
    axes[0].set_ylabel("bytes per parameter")
    entries = {role: Patch(color=style.ROLE_COLORS[role]) for role in ROLES}
    entries["formula"] = Line2D([], [], color=style.PREDICTED, lw=2)
    style.add_title_and_legend(
        figure, "What a rank holds between backward and optimizer step", entries)
    style.add_footer(
        figure, "Counted on a CPU, on the rank that holds most: bf16, "
        f"{records[0]['parameters']:,} parameters. Dashed: at stage 1 ZeRO's paper keeps other "
        "ranks' gradients, which DeepSpeed drops.")
    return figure


def read_sweep(name):
    """Return a sweep's speeds by chapter, ranks and batch, and a footer on its configuration."""
    records = pandas.DataFrame(read_records(f"{name}.jsonl"))
    speeds = records.groupby(["chapter", "ranks", "batch"], sort=False)["images_per_second"]
    rows = speeds.agg(median="median", least="min", most="max", repeats="size").reset_index()
    first = records.iloc[0]
    repeats = " or ".join(map(str, sorted(set(rows["repeats"]))))
    footer = (
        f"{first['model']}, {first['image_size']}x{first['image_size']} pixels, "
        f"{first['precision']}; {first['host']}: {first['processor']}, {first['cpus']} cores, "
        f"{first['device'].upper()}; median, least and most of {repeats} runs of "
        f"{first['steps'] - 5} timed steps")
    return rows.assign(cpus=first["cpus"]), footer


def plot_medians(axis, rows, column, **options):
    """Draw a line through the medians over a column, with bars from the least to the most."""
    bars = [rows["median"] - rows["least"], rows["most"] - rows["median"]]
    axis.errorbar(rows[column], rows["median"], yerr=bars, fmt="o-", capsize=4, **options)


def batch_size():
    """Draw the throughput of one rank by batch size."""
    rows, footer = read_sweep("batch")
    best = rows.loc[rows["median"].idxmax()]
    figure, axis = style.make_figure(
        4.2, title=f"One rank is fastest at a batch of {best['batch']} images, by the median")
    plot_medians(axis, rows, "batch", color=style.LIBRARIES[style.CHAPTERS[best["chapter"]]])
    for row in rows.itertuples():
        axis.annotate(f"{row.median:.0f}", (row.batch, row.most), (0, 5),
                      textcoords="offset points", ha="center")
    axis.set_xscale("log", base=2)
    axis.set(xlabel="batch size", ylabel="images/s", ylim=(0, None))
    axis.set_xticks(rows["batch"], rows["batch"])
    style.add_footer(figure, footer)
    return figure


def scaling():
    """Draw weak and strong scaling of DDP, Horovod and DeepSpeed.

    The upper row shows images/s, the lower one images/s / (ranks * images/s of one rank).
    """
    figure, axes = style.make_figure(5.6, 2, 2, sharex=True, sharey="row", height_ratios=(5, 4))
    ideal = {"color": style.IDEAL, "ls": "--", "zorder": 1}
    entries, footers, tables = {}, [], []
    for column, (name, title) in enumerate((("weak", "Weak scaling: {} images per rank"),
                                            ("strong", "Strong scaling: {} images in all"))):
        rows, footer = read_sweep(name)
        alone = rows[rows["ranks"] == 1].set_index("chapter")["median"]
        rows["efficiency"] = rows["median"] / (rows["ranks"] * rows["chapter"].map(alone))
        footers.append(footer)
        tables.append(rows)
        speed, efficiency = axes[:, column]
        ranks, cores = sorted(rows["ranks"].unique()), rows["cpus"].iloc[0]
        speed.plot(ranks, [alone.mean() * count for count in ranks], **ideal)
        efficiency.plot(ranks, [1] * len(ranks), **ideal)
        for index, (chapter, chapter_rows) in enumerate(rows.groupby("chapter", sort=False)):
            library = style.CHAPTERS[chapter]
            # Bars are shifted so that they do not overlap.
            shifted = chapter_rows.assign(ranks=chapter_rows["ranks"] + 0.07 * (index - 1))
            plot_medians(speed, shifted, "ranks", color=style.LIBRARIES[library])
            entries[library], = efficiency.plot(
                "ranks", "efficiency", "o-", data=shifted, color=style.LIBRARIES[library])
        for axis in speed, efficiency:
            axis.axvspan(cores + 0.5, max(ranks) + 0.3, color=style.ABSENT, zorder=0)
        speed.set_title(title.format(rows["batch"].iloc[0]))
        efficiency.set(xlabel="ranks", xticks=ranks, xlim=(0.7, max(ranks) + 0.3))
    rows = pandas.concat(tables)
    # The limit ignores the upper ideal line, which may leave the picture.
    axes[0, 0].set(ylabel="images/s", ylim=(0, 1.15 * rows["most"].max()))
    axes[1, 0].set(ylabel="efficiency", yticks=(0, 0.5, 1), ylim=(0, 1.15))
    entries["ideal"] = Line2D([], [], **ideal)
    entries["more ranks than cores"] = Patch(color=style.ABSENT)
    best = rows[rows["ranks"] == rows["cpus"]]
    title = (f"{best['ranks'].max()} ranks on {best['cpus'].max()} cores: "
             f"{best['efficiency'].min():.0%} to {best['efficiency'].max():.0%} of the ideal")
    style.add_title_and_legend(figure, title, entries)
    style.add_footer(figure, "\n".join(dict.fromkeys(footers)))
    return figure


def trace():
    """Draw when the CPU launches three steps of chapter 1 and when the GPU computes them."""
    record = json.loads((RECORDS / "trace_h200.json").read_text())
    colors = ("#525252", "#969696", "#737373")  # of neighbouring steps; greys have no other meaning
    figure, axis = style.make_figure(3.2, 1, 1)
    for row, step, start, end in record["steps"]:
        y = ["GPU", "CPU"].index(row)
        axis.barh(y, (end - start) / 1000, 0.6, start / 1000, color=colors[int(step) % 3])
        axis.annotate(f"step {int(step) + 1}", ((start + end) / 2000, y), ha="center", va="center",
                      color="white")
    axis.set(yticks=[0, 1], yticklabels=["GPU computes", "CPU launches"], xlabel="milliseconds")
    style.add_title_and_legend(figure, "The CPU runs ahead, and the GPU never waits", {})
    style.add_footer(
        figure, "ResNet-50, 224 pixels, 256 images per batch, TF32, on one NVIDIA H200")
    return figure


FIGURES = {
    "zero.png": zero, "batch_size.png": batch_size, "scaling.png": scaling, "trace.png": trace,
    "demo.png": lambda: demo.draw(read_records("demo.jsonl")),
    "read_data.png": lambda: reading.draw(pandas.DataFrame(read_records("read_data.jsonl")))}


def main():
    """Save every figure into assets/figures."""
    for name, draw in FIGURES.items():
        draw().savefig(FOLDER / name, dpi=style.DPI)
