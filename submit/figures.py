"""Draw the figures of the READMEs into assets/: what the ranks hold, what they send when, which images they get.

In the drawings a colour is a rank, dark grey is communication and light grey is what takes no part. They have one axis,
whose unit is an inch, so that 1 there is 1 on paper. The measured figures come from the records in assets/.
"""

import json

import pandas
import sweep
from launch import ROOT
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.utils.data import DistributedSampler
from zero import ROLES, total

ASSETS = ROOT / "assets"
RANKS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito's: the colour-blind tell them apart, too
COMMUNICATION = "#404040"
ABSENT = "#E6E6E6"
CHAPTERS = {"01_single_node": ("one process", "#000000"), "02_horovod/pytorch": ("Horovod", "#D55E00"),
            "03_ddp": ("DDP", "#0072B2"), "04_deepspeed": ("DeepSpeed", "#009E73")}  # in measured figures


def canvas(width, height):
    """An empty figure of this size, and an axis over all of it that counts in inches from the lower left corner."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    return figure, axis


def write(axis, x, y, text, **style):
    """Text with its middle at (x, y), unless the style says otherwise."""
    axis.text(x, y, text, **{"ha": "center", "va": "center_baseline", "fontsize": 11, "linespacing": 1.3} | style)


def box(axis, x, y, width, height, fill, label="", **style):
    """A filled rectangle with its lower left corner at (x, y) and a label in its middle; the style is the label's."""
    axis.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor="white"))
    write(axis, x + width / 2, y + height / 2 + 0.02, label, **style)


def arrow(axis, start, end, shape="->", **style):
    """An arrow from one point to another: something is sent."""
    line = {"arrowstyle": shape, "color": COMMUNICATION, "lw": 1.5, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", end, start, arrowprops=line | style)


def bracket(axis, left, right, y, text, **style):
    """A bracket over what lies between left and right, and its name above."""
    axis.plot([left, left, right, right], [y - 0.08, y, y, y - 0.08], color=COMMUNICATION, lw=1.2)
    write(axis, (left + right) / 2, y + 0.06, text, va="bottom", **style)


def parallelism():
    """What each of four ranks holds of a model of four layers and of a batch of 16 images, and what the ranks send.

    One panel for each way to share the work. What a rank holds has its colour, what it does without is light grey.
    """
    figure, axis = canvas(11, 5.5)
    panels = [  # title, subtitle, holds, sends
        ("Data parallel", "the batch is split", "the whole model,\na quarter of the batch",
         "gradients: averaged over the\nranks (all-reduce) in every step"),
        ("Pipeline parallel", "the model is split by layers",
         "one layer; only rank 0 the\nimages, only rank 3 the labels",
         "activations to the next rank,\ngradients (dashed) back"),
        ("Tensor parallel", "each layer is split", "a quarter of each layer,\nthe whole batch",
         "partial results: combined by all\nranks (all-reduce) in each layer")]
    width, height, floor, cell = 0.6, 0.34, 2.45, 0.15  # a layer's size, the foot of layer 1, a cell of the batch
    for number in range(4):
        write(axis, 0.8, floor + 0.45 * number + height / 2, f"layer {number + 1}", ha="right")
    write(axis, 0.8, 1.72 + 2 * cell, "batch", ha="right")
    write(axis, 0.95, 0.18, "Grey: not on this rank.", ha="left", fontsize=10)

    for panel, (title, subtitle, holds, sends) in enumerate(panels):
        left = 0.95 + 3.4 * panel
        columns = [left + 0.8 * rank for rank in range(4)]
        write(axis, left, 5.25, title, ha="left", fontsize=14, weight="bold")
        write(axis, left, 4.97, subtitle, ha="left")
        for y, key, text in ((1.28, "holds", holds), (0.77, "sends", sends)):
            write(axis, left, y, key, ha="left", va="top", weight="bold", fontsize=10)
            write(axis, left + 0.56, y, text, ha="left", va="top", fontsize=10)

        for rank, (x, color) in enumerate(zip(columns, RANKS)):
            write(axis, x + width / 2, 4.62, f"rank {rank}")
            for number in range(4):
                y = floor + 0.45 * number
                box(axis, x, y, width, height, color if panel == 0 or (panel == 1 and number == rank) else ABSENT)
                if panel == 2:
                    box(axis, x + width / 4 * rank, y, width / 4, height, color)
            for image in range(16):
                held = (image // 4 == rank, rank in (0, 3), True)[panel]
                box(axis, x + cell * (image % 4), 1.72 + cell * (3 - image // 4), cell, cell, color if held else ABSENT)

        for rank, x in enumerate(columns[:-1]):
            y = floor + 0.45 * rank
            if panel == 1:
                arrow(axis, (x + 0.4, y + height), (x + 0.8, y + 0.45 + 0.22), connectionstyle="arc3,rad=-0.3")
                arrow(axis, (x + 1.0, y + 0.45), (x + width, y + 0.12), connectionstyle="arc3,rad=-0.3", ls="--")
            if panel == 2:
                for number in range(4):
                    y = floor + 0.45 * number + height / 2
                    arrow(axis, (x + width, y), (x + 0.8, y), "<->")
        if panel == 0:
            box(axis, left, 4.2, 3.0, 0.24, COMMUNICATION, "all-reduce of the gradients", color="white", fontsize=10)
        if panel == 1:
            write(axis, columns[0] + width / 2, 1.58, "images", fontsize=10)
            write(axis, columns[3] + width / 2, 1.58, "labels", fontsize=10)
        else:
            write(axis, left + 1.5, 1.58, "images and labels", fontsize=10)
    return figure


def ddp_step():
    """One training step of DistributedDataParallel on two ranks as a time line, with three buckets of gradients.

    An all-reduce starts when backward has the gradients of its bucket, and runs beside the rest of backward. It joins
    the ranks, so their lanes for it lie side by side. The lengths are made up.
    """
    figure, axis = canvas(11, 4.6)
    ready = [1.75 + 0.6 * time for time in (3.4, 4.6, 7.6, 10.4)]  # backward begins, has done bucket 1, 2, 3
    sent = [1.75 + 0.6 * time for time in (5.2, 9.9, 12.6)]  # the end of each all-reduce
    begin, end, bar = 1.75, 10.4, 0.45
    compute, reduce = (3.05, 0.8), (2.3, 1.55)  # the feet of each rank's two lanes

    write(axis, 0.2, 4.3, "One training step with DistributedDataParallel", ha="left", fontsize=14, weight="bold")
    write(axis, 10.8, 4.3, "schematic, not measured", ha="right", style="italic")
    bracket(axis, ready[0], ready[-1], 3.68, "backward, from the last layer to the first")
    bracket(axis, ready[-1], sent[-1], 3.68, "exposed", weight="bold")
    for rank, color in enumerate(RANKS[:2]):
        write(axis, 0.2, (compute[rank] + reduce[rank] + bar) / 2, f"rank {rank}", ha="left", weight="bold")
        write(axis, begin - 0.1, compute[rank] + bar / 2, "compute", ha="right", fontsize=10)
        write(axis, begin - 0.1, reduce[rank] + bar / 2, "all-reduce", ha="right", fontsize=10)
        box(axis, begin, compute[rank], ready[0] - begin, bar, color, "forward")
        box(axis, ready[-1], compute[rank], sent[-1] - ready[-1], bar, ABSENT, "waits")
        box(axis, sent[-1], compute[rank], end - sent[-1], bar, color, "optimizer")
        for number in range(3):
            left, right = ready[number], ready[number + 1]
            box(axis, left, compute[rank], right - left, bar, color, f"bucket {number + 1}", fontsize=10)
            box(axis, right, reduce[rank], sent[number] - right, bar, COMMUNICATION, f"{number + 1}", color="white")
            foot, head = (compute[rank], reduce[rank] + bar) if rank == 0 else (compute[rank] + bar, reduce[rank])
            arrow(axis, (right, foot), (right, head))
    for number in range(3):
        middle = (ready[number + 1] + sent[number]) / 2
        arrow(axis, (middle, reduce[0]), (middle, reduce[1] + bar), "<->")
    arrow(axis, (begin, 0.6), (10.8, 0.6), lw=1.2)
    write(axis, 10.8, 0.45, "time", ha="right", fontsize=10)
    write(axis, begin, 0.47, "Buckets of gradients: the first about 1 MB, then about 25 MB each (by default).\n"
          "Exposed: communication that no computation hides.", ha="left", va="top", fontsize=10)
    return figure


def horovod_step():
    """One training step with Horovod on two ranks as a time line, with the gradients of four layers.

    A background thread wakes up in every cycle; what is ready on all ranks by then is all-reduced together. Rank 1 is
    a little slower, to show that rank 0 waits for it. The lengths are made up.
    """
    figure, axis = canvas(11, 4.6)
    begin, end, bar, cycle = 1.75, 10.4, 0.45, 0.62
    ready = ((3.3, 4.5, 5.2, 5.9, 7.2), (3.3, 4.75, 5.6, 6.05, 7.6))  # backward begins, has done layers 4, 3, 2, 1
    compute, reduce = (3.05, 0.8), (2.3, 1.55)  # the feet of each rank's two lanes
    ticks = [begin + cycle * number for number in range(1, 12)]
    fused = [(next(tick for tick in ticks if tick >= max(one[last] for one in ready)), length, name)
             for last, length, name in ((1, 0.5, "4"), (3, 0.95, "3 + 2"), (4, 0.75, "1"))]
    done = fused[-1][0] + fused[-1][1]

    write(axis, 0.2, 4.3, "One training step with Horovod", ha="left", fontsize=14, weight="bold")
    write(axis, 10.8, 4.3, "schematic, not measured", ha="right", style="italic")
    bracket(axis, ready[0][0], ready[0][-1], 3.68, "backward, from layer 4 to layer 1")
    bracket(axis, ready[0][-1], done, 3.68, "exposed", weight="bold")
    for rank, color in enumerate(RANKS[:2]):
        write(axis, 0.2, (compute[rank] + reduce[rank] + bar) / 2, f"rank {rank}", ha="left", weight="bold")
        write(axis, begin - 0.1, compute[rank] + bar / 2, "compute", ha="right", fontsize=10)
        write(axis, begin - 0.1, reduce[rank] + bar / 2, "Horovod's thread", ha="right", fontsize=10)
        box(axis, begin, compute[rank], ready[rank][0] - begin, bar, color, "forward")
        for layer, (left, right) in enumerate(zip(ready[rank], ready[rank][1:])):
            box(axis, left, compute[rank], right - left, bar, color, f"{4 - layer}")
        box(axis, ready[rank][-1], compute[rank], done - ready[rank][-1], bar, ABSENT, "waits")
        box(axis, done, compute[rank], end - done, bar, color, "optimizer")
        for tick in ticks:
            axis.plot([tick, tick], [reduce[rank], reduce[rank] + bar], color=COMMUNICATION, lw=0.8, ls=":")
        for start, length, name in fused:
            box(axis, start, reduce[rank], length, bar, COMMUNICATION, name, color="white", fontsize=10)
    for start, length, _ in fused:
        arrow(axis, (start + length / 2, reduce[0]), (start + length / 2, reduce[1] + bar), "<->")
    arrow(axis, (begin, 0.6), (10.8, 0.6), lw=1.2)
    write(axis, 10.8, 0.45, "time", ha="right", fontsize=10)
    write(axis, begin, 0.47, "Dotted: the thread wakes up (every millisecond by default); the ranks agree on what is "
          "ready on all of them.\nThat is fused into one all-reduce (of at most 128 MB by default).",
          ha="left", va="top", fontsize=10)
    return figure


def deepspeed_step():
    """One step of DeepSpeed's engine on two ranks as a time line, with K = 3 micro-batches. The lengths are made up."""
    figure, axis = canvas(11, 4.2)
    begin, forward, backward, reduce, optimizer, bar = 1.75, 0.75, 1.25, 1.35, 0.95, 0.45
    compute, lanes = (2.65, 0.85), (2.0, 1.5)  # the feet of each rank's two lanes
    done = begin + 3 * (forward + backward)

    write(axis, 0.2, 3.9, "One step of DeepSpeed's engine with 3 micro-batches", ha="left", fontsize=14, weight="bold")
    write(axis, 10.8, 3.9, "schematic, not measured", ha="right", style="italic")
    bracket(axis, begin, done, 3.28, "gradients add up, nothing is sent")
    bracket(axis, done, done + reduce, 3.28, "exposed", weight="bold")
    for rank, color in enumerate(RANKS[:2]):
        write(axis, 0.2, (compute[rank] + lanes[rank] + bar) / 2, f"rank {rank}", ha="left", weight="bold")
        write(axis, begin - 0.1, compute[rank] + bar / 2, "compute", ha="right", fontsize=10)
        write(axis, begin - 0.1, lanes[rank] + bar / 2, "all-reduce", ha="right", fontsize=10)
        for number in range(3):
            left = begin + number * (forward + backward)
            box(axis, left, compute[rank], forward, bar, color, "forward", fontsize=10)
            box(axis, left + forward, compute[rank], backward, bar, color, f"backward {number + 1}", fontsize=10)
        box(axis, done, compute[rank], reduce, bar, ABSENT, "waits")
        box(axis, done, lanes[rank], reduce, bar, COMMUNICATION, "gradients", color="white", fontsize=10)
        box(axis, done + reduce, compute[rank], optimizer, bar, color, "optimizer", fontsize=10)
    arrow(axis, (done + reduce / 2, lanes[0]), (done + reduce / 2, lanes[1] + bar), "<->")
    arrow(axis, (begin, 0.6), (10.8, 0.6), lw=1.2)
    write(axis, 10.8, 0.45, "time", ha="right", fontsize=10)
    write(axis, begin, 0.47, "ZeRO off. With one micro-batch a step is one forward, one backward, one all-reduce.",
          ha="left", va="top", fontsize=10)
    return figure


def zero():
    """What a rank of chapter 5 holds in bf16, bytes a parameter by stage and ranks: counted, and the formula as a line.

    From assets/zero.jsonl, which submit/zero.py writes.
    """
    records = [json.loads(line) for line in (ASSETS / "zero.jsonl").read_text().splitlines()]
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
    """The records of assets/NAME.jsonl, their summary by sweep.py, and where they are from, as a line."""
    records = pandas.DataFrame(sweep.read(ASSETS / f"{name}.jsonl"))
    first = records.iloc[0]
    return records, sweep.summary(records), (
        f"{first['model']}, {first['image_size']}x{first['image_size']} pixels, {first['precision']}; {first['host']}: "
        f"{first['processor']}, {first['cpus']} cores, {first['device'].upper()}; median, least and most of "
        f"{records['repeat'].nunique()} runs of {first['steps'] - 5} timed steps")


def points(axis, rows, column, **style):
    """A line through the medians over a column, with bars from the least to the most."""
    axis.errorbar(rows[column], rows["median"], yerr=[rows["median"] - rows["least"], rows["most"] - rows["median"]],
                  fmt="o-", capsize=3, **style)


def batch_size():
    """Throughput of one rank by batch size. From assets/batch.jsonl, which submit/sweep.py writes."""
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
    """Weak and strong scaling of DDP, Horovod and DeepSpeed. From assets/weak.jsonl and strong.jsonl, of sweep.py."""
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


def batch():
    """Which rank gets which of 20 images in two epochs, as DistributedSampler deals them out to three ranks.

    The order is the one that the sampler gives to a single rank, the colour tells whose sampler gives the image.
    """
    images, ranks, local, cell = 20, 3, 2, 0.43

    def dealt(ranks, rank, epoch):
        sampler = DistributedSampler(range(images), ranks, rank, shuffle=True, seed=0, drop_last=True)
        sampler.set_epoch(epoch)
        return list(sampler)

    figure, axis = canvas(11, 3.6)
    write(axis, 0.2, 3.3, f"{images} images for {ranks} ranks, {local} for each rank in each step: "
          f"a global batch of {ranks * local}", ha="left", fontsize=14, weight="bold")
    for epoch, y in enumerate((2.1, 0.95)):
        write(axis, 0.2, y + cell / 2, f"epoch {epoch}", ha="left", weight="bold")
        color = {image: RANKS[rank] for rank in range(ranks) for image in dealt(ranks, rank, epoch)}
        for position, image in enumerate(dealt(1, 0, epoch)):
            step, place = divmod(position, ranks * local)
            x = 1.1 + cell * position + 0.25 * step
            box(axis, x, y, cell, cell, color.get(image, ABSENT), f"{image}", fontsize=12)
            if place == 0:
                size = min(ranks * local, images - position)
                name = f"step {step + 1}: a global batch" if image in color else "waits for\nanother epoch"
                bracket(axis, x + 0.02, x + size * cell - 0.02, y + cell + 0.15, name)
    for rank, color in enumerate(RANKS[:ranks]):
        box(axis, 1.1 + 1.2 * rank, 0.3, 0.24, 0.24, color)
        write(axis, 1.42 + 1.2 * rank, 0.42, f"rank {rank}", ha="left")
    return figure


FIGURES = {"parallelism.png": parallelism, "ddp_step.png": ddp_step, "horovod_step.png": horovod_step,
           "deepspeed_step.png": deepspeed_step, "zero.png": zero, "batch.png": batch, "batch_size.png": batch_size,
           "scaling.png": scaling}


def main():
    """Save every figure into assets/."""
    ASSETS.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        draw().savefig(ASSETS / name, dpi=150)


if __name__ == "__main__":
    main()
