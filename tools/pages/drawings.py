"""The READMEs' drawings: what the ranks hold, what they send when, which images they get.

A colour is a rank, in a time line a phase of the step; dark grey is communication and light grey is what takes no part.
A drawing has one axis, whose unit is an inch, so that 1 there is 1 on paper.
"""

import runpy

import torch
import torch.distributed as dist
from launch import ROOT
from matplotlib.patches import Rectangle
from matplotlib.transforms import Affine2D
from torch.utils.data import DistributedSampler
from torchvision.models import get_model

from tools.measuring.zero import ROLES, total
from tools.style import ABSENT, COMMUNICATION, RANKS, STEP, TEXT, TITLE, WIDTH, Picture

PAPER = "#F5F5F5"  # where something is drawn on
EDGE = 0.15  # inches that stay white at the left and at the right


def canvas(height, title="", note=""):
    """A Picture with a headline, and an axis over it that counts inches from the lower left corner."""
    figure = Picture(figsize=(WIDTH, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, WIDTH), ylim=(0, height))
    axis.axis("off")
    write(axis, EDGE, height - 0.28, title, ha="left", fontsize=TITLE, weight="bold")
    write(axis, WIDTH - EDGE, height - 0.28, note, ha="right", style="italic")
    return figure, axis


def write(axis, x, y, text, **style):
    """Text with its middle at (x, y), unless the style says otherwise."""
    axis.text(x, y, text, **{"ha": "center", "va": "center_baseline", "fontsize": TEXT, "linespacing": 1.2} | style)


def box(axis, x, y, width, height, fill, label="", **style):
    """A filled rectangle with its lower left corner at (x, y) and a label in its middle; the style is the label's."""
    axis.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor="white"))
    color = "white" if fill in (COMMUNICATION, STEP["backward"]) else "black"
    write(axis, x + width / 2, y + height / 2 + 0.02, label, **{"color": color} | style)


def frame(axis, x, y, width, height, **style):
    """The outline of a rectangle with its lower left corner at (x, y)."""
    line = {"fill": False, "edgecolor": COMMUNICATION, "lw": 1.5, "zorder": 3}
    axis.add_patch(Rectangle((x, y), width, height, **line | style))


def names(axis, feet, height, texts, **style):
    """What stands at the left of rows with these feet and this height."""
    for foot, text in zip(feet, texts):
        line = "center" if "\n" in text else "center_baseline"
        write(axis, EDGE, foot + height / 2 + 0.02, text, ha="left", va=line, **style)


def legend(axis, left, foot, apart, entries):
    """Small boxes in a line with their names beside them. entries: (name, colour)."""
    for place, (name, color) in enumerate(entries):
        box(axis, left + apart * place, foot, 0.27, 0.27, color)
        write(axis, left + apart * place + 0.35, foot + 0.15, name, ha="left")


def arrow(axis, start, end, shape="-|>", **style):
    """An arrow from one point to another: something is sent."""
    line = {"arrowstyle": f"{shape},head_length=0.4,head_width=0.22", "color": COMMUNICATION, "lw": 2, "shrinkA": 0,
            "shrinkB": 0, "mutation_scale": 16}
    axis.annotate("", end, start, arrowprops=line | style)


def bracket(axis, left, right, y, text, **style):
    """A bracket over what lies between left and right, and its name above."""
    axis.plot([left, left, right, right], [y - 0.09, y, y, y - 0.09], color=COMMUNICATION, lw=1.5)
    write(axis, (left + right) / 2, y + 0.08, text, va="bottom", **style)


def parallelism():
    """What each of four ranks holds of a model of four layers and of a batch of 16 images, and what the ranks send.

    One panel for each way to share the work. What a rank holds has its colour, what it does without is light grey.
    """
    figure, axis = canvas(4.6)
    panels = (("the batch is split", "gradients"), ("pipeline: by layers", "activations up,\ngradients down"),
              ("tensor: in each layer", "partial results"))  # what is split, what is sent
    left, apart = 1.05, 2.68  # the first panel, and from panel to panel
    pitch, width, height, cell = 0.62, 0.52, 0.28, 0.13  # from rank to rank; of a rank, of a layer, of an image
    feet, batch = (1.5, 1.85, 2.54, 2.89), 0.9  # the foot of each layer, and of the batch
    bars = ((3.24,), (), (2.2, 3.24))  # the foot of each all-reduce, by panel
    across = 3 * pitch + width

    names(axis, (3.53, *feet[::-1], batch + 0.12, 0.17), height,
          ("rank", "layer 4", "layer 3", "layer 2", "layer 1", "batch", "sent"))
    for start, end, title in ((left, left + across, "Data parallel"),
                              (left + apart, left + 2 * apart + across, "Model parallel")):
        write(axis, start, 4.38, title, ha="left", fontsize=TITLE, weight="bold")
        axis.plot([start, end], [4.21, 4.21], color=COMMUNICATION, lw=1.5)

    for panel, (title, text) in enumerate(panels):
        columns = [left + apart * panel + pitch * rank for rank in range(4)]
        write(axis, columns[0], 4.02, title, ha="left")
        write(axis, columns[0] + across / 2, 0.3, text, va="center")
        for rank, (x, color) in enumerate(zip(columns, RANKS)):
            write(axis, x + width / 2, 3.69, f"{rank}")
            for layer, y in enumerate(feet):
                start, part = ((0, 1), (0, layer == rank), (rank / 4, 1 / 4))[panel]
                box(axis, x, y, width, height, ABSENT)
                box(axis, x + width * start, y, width * part, height, color)
            for image in range(16):
                row, column = divmod(image, 4)
                held = (row == rank, rank in (0, 3), True)[panel]
                box(axis, x + cell * column, batch + cell * (3 - row), cell, cell, color if held else ABSENT)
        for y in bars[panel]:
            box(axis, columns[0], y, across, height, COMMUNICATION, "all-reduce")
        if panel == 1:
            for rank, x in enumerate(columns[:-1]):
                arrow(axis, (x + 0.22, feet[rank] + height), (x + pitch, feet[rank + 1] + 0.19), shrinkB=1,
                      connectionstyle="arc3,rad=-0.4")
                arrow(axis, (x + pitch + 0.3, feet[rank + 1]), (x + width, feet[rank] + 0.09), shrinkB=1,
                      connectionstyle="arc3,rad=-0.4")
            write(axis, columns[0] + width / 2, batch - 0.16, "images")
            write(axis, columns[3] + width / 2, batch - 0.16, "labels")
        else:
            write(axis, columns[0] + across / 2, batch - 0.16, "images and labels")
    return figure


def gradient(weight, points):
    """The derivative by the weight of the loss: the mean over the points (x, y) of (weight x - y)^2 / 2."""
    return sum(x * (weight * x - y) for x, y in points) / len(points)


def averaging():
    """A step of four ranks with two points each, beside that of one rank with all eight: a line through the origin."""
    of_ranks = (((1, 2), (5, 6)), ((2, 5), (3, 5)), ((4, 6), (2, 3)), ((3, 1), (1, 3)))  # (x, y)
    own, whole = [gradient(1, points) for points in of_ranks], gradient(1, sum(of_ranks, ()))
    average = sum(own) / len(own)
    width, bar, columns, alone = 1.14, 0.36, [1.67 + 1.38 * rank for rank in range(4)], 7.71
    reduce_foot, feet = 1.43, (2.07, 0.79, 0.15)  # of the own gradient, of the average, of the new slope
    figure, axis = canvas(4.6, "Averaging gradients: four ranks take the step of one")

    def number(value):
        return f"{value:g}".replace("-", "\N{MINUS SIGN}")

    def plot(left, parts):
        """Points in the colours of their ranks, and how far they are from the line."""
        box(axis, left, 2.72, width, 1.05, PAPER)
        plane = Affine2D().scale(0.19, 0.145).translate(left + 0.08, 2.78) + axis.transData
        axis.plot([0, 5.2], [0, 5.2], color=COMMUNICATION, lw=2, zorder=3, transform=plane)
        for rank, points in parts:
            for x, y in points:
                axis.plot([x, x], [x, y], color=RANKS[rank], lw=2.5, zorder=2, transform=plane)
                axis.plot(x, y, "o", color=RANKS[rank], ms=8, zorder=4, transform=plane)

    names(axis, (3.3, 3.05, 2.8), bar, ("own points,", "same line:", "y = 1 x"))
    names(axis, (reduce_foot, *feet), bar, ("all-reduce", "own gradient", "average", "new slope,\nrate 0.1"))
    for rank, (left, color) in enumerate(zip(columns, RANKS)):
        middle = left + width / 2
        write(axis, middle, 3.93, f"rank {rank}", weight="bold")
        plot(left, [(rank, of_ranks[rank])])
        for foot, value in zip(feet, (own[rank], average, 1 - 0.1 * average)):
            box(axis, left, foot, width, bar, color, number(value), fontsize=TITLE)
        for start in (2.7, feet[0], reduce_foot, feet[1]):
            arrow(axis, (middle, start), (middle, start - 0.27))
    terms = " + ".join(map(number, own)).replace("+ \N{MINUS SIGN}", "\N{MINUS SIGN} ")
    box(axis, columns[0], reduce_foot, columns[3] + width - columns[0], bar, COMMUNICATION,
        f"({terms}) / {len(own)} = {number(average)}", fontsize=TITLE)

    middle = alone + width / 2
    write(axis, middle, 3.93, "one rank", weight="bold")
    plot(alone, enumerate(of_ranks))
    arrow(axis, (middle, 2.7), (middle, feet[1] + bar + 0.01))
    arrow(axis, (middle, feet[1]), (middle, feet[1] - 0.27))
    for foot, value in zip(feet[1:], (whole, 1 - 0.1 * whole)):
        frame(axis, alone, foot, width, bar)
        write(axis, middle, foot + bar / 2 + 0.02, number(value), fontsize=TITLE)
        write(axis, (columns[3] + width + alone) / 2, foot + bar / 2, "=", fontsize=20, weight="bold")
    return figure


# --- what two processes have ---

COLUMNS, COLUMN, INSIDE, BAR = (1.75, 5.4), 3.45, 2.95, 0.38  # inches: where each begins, its width, what it holds


def across(axis, foot, fill, label):
    """A bar over both processes."""
    box(axis, COLUMNS[0] - 0.08, foot, COLUMNS[1] + COLUMN - COLUMNS[0] + 0.16, BAR, fill, label)


def buckets(model):
    """Bytes of each parameter, by bucket of DDP, in the order in which backward fills them from the second step on.

    Computed by DDP's own function, with its defaults: the gradients of the last parameters are ready first.
    """
    parameters = list(model.parameters())[::-1]
    found, _ = dist._compute_bucket_assignment_by_size(parameters, [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20])
    return [[parameters[index].nbytes for index in bucket] for bucket in found]


def ddp_processes():
    """What each of two processes of DDP has: its images, the whole model, buckets of gradients, drawn to scale."""
    with torch.device("meta"):  # sizes without memory
        model = get_model("resnet18", num_classes=10)
    filled = buckets(model)
    layers = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in reversed(list(model.children()))]
    scale = INSIDE / sum(layers)
    launcher, images, whole, gradients, group, optimizer = feet = (4.62, 3.4, 2.65, 2.21, 1.45, 0.67)
    figure, axis = canvas(5.6, "DistributedDataParallel: what each of two processes has")

    names(axis, feet, BAR, ("launcher", "images", f"ResNet-18,\n{sum(layers) / 1e6:.1f} MB", "buckets, MB",
                            "process group", "optimizer"))
    across(axis, launcher, ABSENT, "mpiexec, srun or torchrun: one process a GPU")
    for rank, (left, color) in enumerate(zip(COLUMNS, RANKS)):
        middle, x = left + COLUMN / 2, left + (COLUMN - INSIDE) / 2
        arrow(axis, (middle, launcher), (middle, 4.3))
        frame(axis, left, 0.47, COLUMN, 3.8, edgecolor=color, lw=3, zorder=1)
        write(axis, middle, 4.02, f"process of rank {rank}", weight="bold")
        for place, image in enumerate(DistributedSampler(range(8), 2, rank)):
            box(axis, x + INSIDE / 4 * place, images, INSIDE / 4, BAR, color, f"{image}")
        frame(axis, left + 0.13, 2.11, COLUMN - 0.26, 1.2, lw=1.2, ls="--")
        write(axis, middle, 3.17, "DDP(model)")
        for place, size in enumerate(layers):
            box(axis, x + scale * sum(layers[:place]), whole, scale * size, BAR, color)
        for size in map(sum, filled):
            box(axis, x, gradients, scale * size, BAR, COMMUNICATION, f"{size / 1e6:.1f}")
            arrow(axis, (x + scale * size / 2, gradients - 0.02), (x + scale * size / 2, group + BAR), "<|-|>")
            x += scale * size
        arrow(axis, (middle, group), (middle, optimizer + BAR))
        box(axis, middle - INSIDE / 2, optimizer, INSIDE, BAR, color, "the same step")
    across(axis, group, COMMUNICATION, "an all-reduce of each bucket as soon as it is full")
    last = max(filled[0]) / 1e6
    write(axis, COLUMNS[0], 0.24, f"No tensor is cut: the last convolution has {last:.1f} MB.", ha="left")
    return figure


def horovod_layers():
    """Horovod's layers on two ranks, and how the gradients that both have ready are fused. The lengths are made up."""
    figure, axis = canvas(5.6, "Horovod, from your script to the network", "schematic, not measured")
    script, interface, ready, agreed, fused, transport = 4.2, 3.51, 2.39, 1.72, 1.05, 0.2
    width = 0.5  # of a layer's gradients
    names(axis, (script, interface, 2.77, transport), BAR, ("your script", "interface", "core", "transport"),
          weight="bold")
    names(axis, (ready, agreed, fused), BAR, ("1. ready here", "2. agreed", "3. fused"))
    for rank, (left, color) in enumerate(zip(COLUMNS, RANKS)):
        middle, x = left + COLUMN / 2, left + (COLUMN - INSIDE) / 2
        write(axis, middle, 4.78, f"rank {rank}", weight="bold")
        box(axis, left, script, COLUMN, BAR, color, "forward, backward, optimizer")
        box(axis, left, interface, COLUMN, BAR, color, "PyTorch's or TensorFlow's")
        frame(axis, left, 0.88, COLUMN, 2.33, edgecolor=color, lw=3, zorder=1)
        write(axis, x, 2.98, "background thread", ha="left")
        for start, end in (script, interface), (interface, 2.85), (agreed, fused), (fused, transport):
            arrow(axis, (middle, start), (middle, end + BAR))
        box(axis, x, fused, INSIDE, BAR, ABSENT)
        write(axis, x + INSIDE - 0.72, fused + BAR / 2 + 0.02, "up to 128 MB")
        box(axis, x + INSIDE - width, ready, width, BAR, ABSENT)  # rank 1 is not as far
        for place, layer in enumerate((4, 3, 2, 1)[:4 - rank]):
            start = x + place * (INSIDE - width) / 3
            box(axis, start, ready, width, BAR, color, f"{layer}")
            arrow(axis, (start + width / 2, ready), (start + width / 2, agreed + BAR))
        for place, layer in enumerate((4, 3, 2)):
            box(axis, x + place * width, fused, width, BAR, color, f"{layer}")
    across(axis, agreed, COMMUNICATION, "MPI or gloo: 4, 3, 2 are ready on both")
    across(axis, transport, COMMUNICATION, "one all-reduce: NCCL on GPUs, otherwise MPI or gloo")
    return figure


# --- a training step of two ranks ---

LANE, GAP, BEGIN, END = 0.55, 0.38, 1.3, 8.85  # inches: a lane's height, that between two, where lanes begin and end


def time_line(title, computes, phases, sends, sent, height=4):
    """Two ranks' phases, and between them the all-reduces, which join them. The lengths are made up.

    computes: what stands over rank 0 until it waits, and from where on. phases: of each rank names and ends, the last
    two of waiting and of the optimizer. sends: at the ends of how many phases before these something is sent. sent:
    name, begin and end of each all-reduce. Returns figure, axis, and the foot of the all-reduces.
    """
    figure, axis = canvas(height, title, "schematic, not measured")
    top, middle, bottom = feet = [height - 1.65 - (LANE + GAP) * number for number in range(3)]
    colors = STEP | {"waits": ABSENT}
    label, start = computes
    *_, waits, optimizer, _ = phases[0][1]
    bracket(axis, start, waits, top + LANE + 0.2, label)
    bracket(axis, waits, optimizer, top + LANE + 0.2, "exposed", weight="bold")
    box(axis, BEGIN, middle, END - BEGIN, LANE, PAPER)
    for name, start, end in sent:
        box(axis, start, middle, end - start, LANE, COMMUNICATION, name)
    edges = ((top, top, middle + LANE), (bottom, bottom + LANE, middle))  # a lane's foot; an arrow's ends
    for (foot, near, far), (labels, ends) in zip(edges, phases):
        for label, start, end in zip(labels, (BEGIN, *ends), ends):
            box(axis, start, foot, end - start, LANE, colors.get(label, STEP["backward"]), label)
        for ready in ends[-2 - sends:-2]:
            arrow(axis, (ready, near), (ready, far))
        arrow(axis, (optimizer, far), (optimizer, near))
    names(axis, feet[::2], LANE, ("rank 0", "rank 1"), weight="bold")
    names(axis, [middle], LANE, ["all-reduce"])
    write(axis, END, bottom - 0.23, "time", ha="right")
    arrow(axis, (BEGIN, bottom - 0.23), (END - 0.52, bottom - 0.23))
    return figure, axis, middle


def ddp_step():
    """One training step of DistributedDataParallel, with three buckets of gradients.

    An all-reduce starts when backward has the gradients of its bucket, and runs beside the rest of backward.
    """
    phases = (("forward", "bucket 1", "bucket 2", "bucket 3", "waits", "optimizer"), (2.3, 3.4, 5.05, 6.55, 7.75, END))
    sent = (("1", 3.4, 4), ("2", 5.05, 6.3), ("3", 6.55, 7.75))
    figure, _, _ = time_line("One training step with DDP", ("backward, from the last layer", 2.3), (phases, phases), 3,
                             sent)
    return figure


def horovod_step():
    """One training step with Horovod, with the gradients of four layers.

    A background thread wakes up in every cycle; what is ready on all ranks by then is all-reduced together. Rank 1 is
    a little slower, to show that rank 0 waits for it.
    """
    labels = ("forward", "4", "3", "2", "1", "waits", "optimizer")
    phases = ((labels, (2.4, 3.4, 4.1, 4.65, 6, 7.55, END)), (labels, (2.4, 3.65, 4.45, 4.85, 6.5, 7.55, END)))
    sent = (("4", 3.7, 4.2), ("3 + 2", 4.9, 5.85), ("1", 6.7, 7.55))
    figure, axis, middle = time_line("One training step with Horovod", ("backward, layer 4 to 1", 2.4), phases, 4, sent,
                                     height=4.45)
    cycles = [BEGIN + 0.6 * cycle for cycle in range(1, 13)]
    axis.vlines(cycles, middle, middle + LANE, color=COMMUNICATION, lw=1.5, ls=":")
    write(axis, BEGIN, 0.3, "dotted: a cycle begins; what is ready on both goes together", ha="left")
    return figure


def deepspeed_step():
    """One step of DeepSpeed's engine, with two micro-batches."""
    phases = (("forward", "backward", "forward", "backward", "waits", "optimizer"), (2.3, 3.8, 4.8, 6.3, 7.65, END))
    figure, _, _ = time_line("One step of DeepSpeed's engine, ZeRO off",
                             ("2 micro-batches: gradients add up, nothing is sent", BEGIN), (phases, phases), 1,
                             [("once", 6.3, 7.65)])
    return figure


# --- who has which part ---

def ring():
    """The ring all-reduce of four ranks at its start, at half time and at its end: who has whose parts, who sends what.

    A row is a rank, its four cells are its chunks, and a stripe in a cell is a rank's part of the chunk. Chunk c goes
    from rank c around, and each rank adds its part. After Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009).
    """
    figure, axis = canvas(4.6, "Ring all-reduce: after 6 steps all 4 ranks have the sum")
    cell, height, rows, ranks = 0.5, 0.38, (2.81, 2.13, 1.45, 0.77), range(4)
    own, everybody = [[{rank}] * 4 for rank in ranks], [[set(ranks)] * 4] * 4
    half = [[{(rank - steps) % 4 for steps in range((rank - chunk) % 4 + 1)} for chunk in ranks] for rank in ranks]
    panels = ((1.15, "reduce-scatter", "step 1: the next adds", own, (0, 1, 2, 3)),
              (4.15, "all-gather", "step 4: the next keeps", half, (1, 2, 3, 0)),
              (6.85, "done", "after step 6", everybody, ()))  # place, text, parts by rank and chunk, what ranks send
    names(axis, rows, height, [f"rank {rank}" for rank in ranks], weight="bold")
    for left, title, text, held, sends in panels:
        write(axis, left, 3.94, title, ha="left", weight="bold")
        write(axis, left, 3.66, text, ha="left")
        for row, y in zip(held, rows):
            for chunk, parts in enumerate(row):
                x = left + cell * chunk
                for rank, color in enumerate(RANKS):
                    axis.add_patch(Rectangle((x + cell / 4 * rank, y), cell / 4, height,
                                             facecolor=color if rank in parts else ABSENT))
                frame(axis, x, y, cell, height, edgecolor="white", lw=3)
        for rank, chunk in enumerate(sends):
            x, y, top = left + cell * (chunk + 0.5), rows[rank], rows[(rank + 1) % 4] + height
            frame(axis, left + cell * chunk, y, cell, height, edgecolor="black", lw=2.5, zorder=4)
            arrow(axis, (x, y if rank < 3 else top + 0.22), (x, top))
            if rank == 3:  # around to rank 0
                way = left + cell * (4.3 if chunk else -0.3)
                axis.plot([x, x, way, way, x], [y, y - 0.14, y - 0.14, top + 0.22, top + 0.22], color=COMMUNICATION,
                          lw=2, solid_joinstyle="miter")
    write(axis, EDGE, 0.3, "each row: 4 chunks; each colour: one rank's part; frame: what a rank sends", ha="left")
    return figure


def zero_partition():
    """What each of four ranks holds under ZeRO's stages 0 to 3, in bytes a parameter, by chapter 5's formula."""
    formula = runpy.run_path(str(ROOT / "05_zero" / "accounting.py"))["formula"]
    stages = [formula(stage, 4, 1, 0, width=2, gathered=2, master=4, moments=8, keeps_gradients=True)
              for stage in range(4)]
    whole, left, byte, gap, bar, pitch = stages[0], 1.2, 0.33, 0.46, 0.145, 0.167
    feet, sums = [2.9 - 0.795 * stage for stage in range(4)], ("", "4 + 12/4", "2 + 14/4", "16/4")

    figure, axis = canvas(4.6, "ZeRO: what each of 4 ranks holds, in bytes a parameter")
    names(axis, feet, 4 * pitch, [f"stage {stage}" for stage in range(4)], weight="bold")
    x = left
    for role in ROLES:
        length = byte * whole[role]
        write(axis, x + length / 2, 3.855, f"{role}\n{whole[role]:g}", va="center")
        for foot, held in zip(feet, stages):
            part = byte * held[role]
            for rank, color in enumerate(RANKS):
                y = foot + pitch * (3 - rank)
                box(axis, x, y, length, bar, ABSENT)
                box(axis, x + (rank * part if part < length else 0), y, part, bar, color)
        x += length + gap
    write(axis, 8.4, 3.855, "sum of\none rank", va="center")
    for foot, held, terms in zip(feet, stages, sums):
        write(axis, 8.4, foot + 2 * pitch + (0.13 if terms else 0), f"{total(held):g}", fontsize=TITLE, weight="bold")
        write(axis, 8.4, foot + 2 * pitch - 0.15, terms)
    legend(axis, left, 0.1, 1.15, [(f"rank {rank}", color) for rank, color in enumerate(RANKS)]
           + [("not on this rank", ABSENT)])
    return figure


def batch():
    """Which rank gets which of 20 images in two epochs, as DistributedSampler deals them out to three ranks.

    The order is the one that the sampler gives to a single rank, the colour tells whose sampler gives the image.
    """
    def dealt(ranks, rank, epoch):
        sampler = DistributedSampler(range(20), ranks, rank, shuffle=True, seed=0, drop_last=True)
        sampler.set_epoch(epoch)
        return list(sampler)

    cell, feet = 0.352, (2.05, 0.95)
    figure, axis = canvas(3.5, "20 images, 3 ranks: a global batch of 3 x 2 in each step")
    names(axis, feet, cell, ("epoch 0", "epoch 1"), weight="bold")
    for epoch, y in enumerate(feet):
        color = {image: RANKS[rank] for rank in range(3) for image in dealt(3, rank, epoch)}
        for position, image in enumerate(dealt(1, 0, epoch)):
            x = 1.2 + cell * position + 0.18 * (position // 6)
            box(axis, x, y, cell, cell, color.get(image, ABSENT), f"{image}")
            if position % 6 == 0:
                bracket(axis, x + 0.02, x + min(6, 20 - position) * cell - 0.02, y + cell + 0.17,
                        f"step {position // 6 + 1}" if image in color else "left over")
    legend(axis, 1.2, 0.3, 1.2, [(f"rank {rank}", color) for rank, color in enumerate(RANKS[:3])]
           + [("waits for another epoch", ABSENT)])
    return figure


DRAWINGS = (parallelism, averaging, ddp_processes, ddp_step, horovod_layers, horovod_step, ring, deepspeed_step,
            zero_partition, batch)
