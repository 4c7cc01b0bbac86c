"""The READMEs' drawings: what the ranks hold, what they send when, which images they get.

A colour is a rank, in a time line a phase of the step; dark grey is communication and light grey is what takes no part.
A drawing has one axis, whose unit is an inch, so that 1 there is 1 on paper. Numbers, shares and bucket sizes in it are
computed, not typed.
"""

import runpy

import torch
import torch.distributed as dist
from launch import ROOT
from matplotlib.patches import Rectangle
from torch.utils.data import DistributedSampler
from torchvision.models import get_model

from tools.measuring.zero import ROLES, total
from tools.pages.style import ABSENT, COMMUNICATION, RANKS, STEP, TEXT, TITLE, WIDTH, Picture

POINTS = (((1, 2), (5, 6)), ((2, 5), (3, 5)), ((4, 6), (2, 3)), ((3, 1), (1, 3)))  # (x, y) of averaging(), by rank
WEIGHT, RATE = 1.0, 0.1
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
    write(axis, x + width / 2, y + height / 2 + 0.02, label, **style)


def frame(axis, x, y, width, height, **style):
    """The outline of a rectangle with its lower left corner at (x, y)."""
    line = {"fill": False, "edgecolor": COMMUNICATION, "lw": 1.5, "zorder": 3}
    axis.add_patch(Rectangle((x, y), width, height, **line | style))


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
    pitch, width = 0.62, 0.52  # from rank to rank, and of a rank
    height, bar, cell = 0.28, 0.27, 0.13  # of a layer, of an all-reduce; a cell of the batch
    feet, batch = (1.5, 1.85, 2.54, 2.89), 0.9  # the foot of each layer, and of the batch
    bars = (2.2, 3.24)  # the foot of the all-reduce after layer 2 and after layer 4
    across = 3 * pitch + width

    write(axis, 0.9, 3.69, "rank", ha="right")
    for number, foot in enumerate(feet):
        write(axis, 0.9, foot + height / 2 + 0.02, f"layer {number + 1}", ha="right")
    write(axis, 0.9, batch + 2 * cell + 0.02, "batch", ha="right")
    write(axis, 0.9, 0.3, "sent", ha="right", va="center")
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
            for number, y in enumerate(feet):
                box(axis, x, y, width, height, color if panel == 0 or (panel == 1 and number == rank) else ABSENT)
                if panel == 2:
                    box(axis, x + width / 4 * rank, y, width / 4, height, color)
            for image in range(16):
                held = (image // 4 == rank, rank in (0, 3), True)[panel]
                box(axis, x + cell * (image % 4), batch + cell * (3 - image // 4), cell, cell,
                    color if held else ABSENT)
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
            for y in bars if panel == 2 else bars[1:]:
                box(axis, columns[0], y, across, bar, COMMUNICATION, "all-reduce", color="white")
    return figure


def gradient(weight, points):
    """The derivative by the weight of the loss: the mean over the points (x, y) of (weight x - y)^2 / 2."""
    return sum(x * (weight * x - y) for x, y in points) / len(points)


def averaging():
    """A step of four ranks with two points each, beside that of one rank with all eight: a line through the origin."""
    def number(value):
        return f"{value:g}".replace("-", "\N{MINUS SIGN}")

    def plot(left, parts):
        """Points in the colours of their ranks, and how far they are from the line of the weight."""
        def place(x, y):
            return left + 0.08 + 0.19 * x, 2.78 + 0.145 * y

        box(axis, left, 2.72, width, 1.05, PAPER)
        axis.plot(*zip(place(0, 0), place(5.2, 5.2 * WEIGHT)), color=COMMUNICATION, lw=2, zorder=3)
        for rank, points in parts:
            for x, y in points:
                axis.plot(*zip(place(x, WEIGHT * x), place(x, y)), color=RANKS[rank], lw=2.5, zorder=2)
                axis.plot(*place(x, y), "o", color=RANKS[rank], ms=8, zorder=4)

    figure, axis = canvas(4.6, "Averaging gradients: four ranks take the step of one")
    own, whole = [gradient(WEIGHT, points) for points in POINTS], gradient(WEIGHT, sum(POINTS, ()))
    average = sum(own) / len(own)
    width, bar, columns, alone = 1.14, 0.36, [1.67 + 1.38 * rank for rank in range(4)], 7.71
    foot = {"own": 2.07, "all-reduce": 1.43, "average": 0.79, "after": 0.15}
    terms = " + ".join(map(number, own)).replace("+ \N{MINUS SIGN}", "\N{MINUS SIGN} ")

    for y, text in ((3.5, "own points,"), (3.25, "same line:"), (3, f"y = {number(WEIGHT)} x")):
        write(axis, EDGE, y, text, ha="left")
    for row, text in zip(foot, ("own gradient", "all-reduce", "average")):
        write(axis, EDGE, foot[row] + bar / 2 + 0.02, text, ha="left")
    write(axis, EDGE, foot["after"] + bar / 2, f"new slope,\nrate {number(RATE)}", ha="left", va="center")
    for rank, (left, color) in enumerate(zip(columns, RANKS)):
        middle = left + width / 2
        write(axis, middle, 3.93, f"rank {rank}", weight="bold")
        plot(left, [(rank, POINTS[rank])])
        for row, value in (("own", own[rank]), ("average", average), ("after", WEIGHT - RATE * average)):
            box(axis, left, foot[row], width, bar, color, number(value), fontsize=TITLE)
        for start in (2.7, foot["own"], foot["all-reduce"], foot["average"]):
            arrow(axis, (middle, start), (middle, start - 0.27))
    box(axis, columns[0], foot["all-reduce"], columns[3] + width - columns[0], bar, COMMUNICATION,
        f"({terms}) / {len(own)} = {number(average)}", color="white", fontsize=TITLE)

    middle = alone + width / 2
    write(axis, middle, 3.93, "one rank", weight="bold")
    plot(alone, enumerate(POINTS))
    arrow(axis, (middle, 2.7), (middle, foot["average"] + bar + 0.01))
    arrow(axis, (middle, foot["average"]), (middle, foot["average"] - 0.27))
    for row, value in (("average", whole), ("after", WEIGHT - RATE * whole)):
        frame(axis, alone, foot[row], width, bar)
        write(axis, middle, foot[row] + bar / 2 + 0.02, number(value), fontsize=TITLE)
        write(axis, (columns[3] + width + alone) / 2, foot[row] + bar / 2, "=", fontsize=20, weight="bold")
    return figure


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
    filled = [(sum(bucket), max(bucket)) for bucket in buckets(model)]
    layers = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in reversed(list(model.children()))]
    figure, axis = canvas(5.6, "DistributedDataParallel: what each of two processes has")
    columns, width, inside, bar = (1.75, 5.4), 3.45, 2.95, 0.38
    across, scale = columns[1] + width - columns[0], inside / sum(layers)
    foot = {"launcher": 4.62, "images": 3.4, "model": 2.65, "gradients": 2.21, "all-reduce": 1.45, "optimizer": 0.67}

    for row, text in zip(foot, ("launcher", "images", f"ResNet-18,\n{sum(layers) / 1e6:.1f} MB", "buckets, MB",
                                "process group", "optimizer")):
        y = foot[row] + bar / 2 + (0.16 if row == "model" else 0.02)
        write(axis, EDGE, y, text, ha="left", va="center" if row == "model" else "center_baseline")
    box(axis, columns[0], foot["launcher"], across, bar, ABSENT, "mpiexec, srun or torchrun: one process a GPU")
    for rank, (left, color) in enumerate(zip(columns, RANKS)):
        middle, x = left + width / 2, left + (width - inside) / 2
        arrow(axis, (middle, foot["launcher"]), (middle, 4.3))
        frame(axis, left, 0.47, width, 3.8, edgecolor=color, lw=3, zorder=1)
        write(axis, middle, 4.02, f"process of rank {rank}", weight="bold")
        images = list(DistributedSampler(range(8), 2, rank))
        for place, image in enumerate(images):
            box(axis, x + inside / len(images) * place, foot["images"], inside / len(images), bar, color, f"{image}")
        frame(axis, left + 0.13, 2.11, width - 0.26, 1.2, lw=1.2, ls="--")
        write(axis, middle, 3.17, "DDP(model)")
        for place, size in enumerate(layers):
            box(axis, x + scale * sum(layers[:place]), foot["model"], scale * size, bar, color)
        for size, _ in filled:
            box(axis, x, foot["gradients"], scale * size, bar, COMMUNICATION, f"{size / 1e6:.1f}", color="white")
            arrow(axis, (x + scale * size / 2, foot["gradients"] - 0.02),
                  (x + scale * size / 2, foot["all-reduce"] + bar), "<|-|>")
            x += scale * size
        arrow(axis, (middle, foot["all-reduce"]), (middle, foot["optimizer"] + bar))
        box(axis, middle - inside / 2, foot["optimizer"], inside, bar, color, "the same step")
    box(axis, columns[0] - 0.08, foot["all-reduce"], across + 0.16, bar, COMMUNICATION,
        "an all-reduce of each bucket as soon as it is full", color="white")
    write(axis, columns[0], 0.24, f"No tensor is cut: the last convolution has {filled[0][1] / 1e6:.1f} MB.", ha="left")
    return figure


LANE, GAP, END = 0.55, 0.38, 8.85  # inches: the height of a time line's lane, between two, and where the lanes end


def time_line(title, begin, height=4):
    """A canvas with the lanes of two ranks, one for the all-reduce between them, and the feet of all three."""
    figure, axis = canvas(height, title, "schematic, not measured")
    feet = [height - 1.65 - (LANE + GAP) * number for number in range(3)]
    write(axis, EDGE, feet[0] + LANE / 2 + 0.02, "rank 0", ha="left", weight="bold")
    write(axis, EDGE, feet[2] + LANE / 2 + 0.02, "rank 1", ha="left", weight="bold")
    box(axis, begin, feet[1], END - begin, LANE, PAPER)
    write(axis, END, feet[2] - 0.23, "time", ha="right")
    arrow(axis, (begin, feet[2] - 0.23), (END - 0.52, feet[2] - 0.23))
    return figure, axis, feet


def phase(axis, left, right, foot, name, label=None):
    """A phase of a step in a lane of a time line, with its name or another label."""
    box(axis, left, foot, right - left, LANE, STEP[name], name if label is None else label,
        color="white" if name == "backward" else "black")


def joined(axis, x, feet, rank, back=False):
    """An arrow from a rank's lane into the one between the ranks, or back."""
    way = (feet[0], feet[1] + LANE) if rank == 0 else (feet[2] + LANE, feet[1])
    start, end = way[::-1] if back else way
    arrow(axis, (x, start), (x, end))


def ddp_step():
    """One training step of DistributedDataParallel on two ranks as a time line, with three buckets of gradients.

    An all-reduce starts when backward has the gradients of its bucket, and runs beside the rest of backward. It joins
    the ranks, so their lane for it lies between them. The lengths are made up.
    """
    begin, ready = 1.3, (2.3, 3.4, 5.05, 6.55)  # forward begins; backward begins, has done bucket 1, 2, 3
    sent = (4.0, 6.3, 7.75)  # the end of each all-reduce
    figure, axis, feet = time_line("One training step with DDP", begin)
    over = feet[0] + LANE + 0.2

    bracket(axis, ready[0], ready[-1], over, "backward, from the last layer")
    bracket(axis, ready[-1], sent[-1], over, "exposed", weight="bold")
    write(axis, EDGE, feet[1] + LANE / 2 + 0.02, "all-reduce", ha="left")
    for rank, foot in enumerate(feet[::2]):
        phase(axis, begin, ready[0], foot, "forward")
        for number, (left, right) in enumerate(zip(ready, ready[1:])):
            phase(axis, left, right, foot, "backward", f"bucket {number + 1}")
            joined(axis, right, feet, rank)
        box(axis, ready[-1], foot, sent[-1] - ready[-1], LANE, ABSENT, "waits")
        phase(axis, sent[-1], END, foot, "optimizer")
        joined(axis, sent[-1], feet, rank, back=True)
    for number, (start, end) in enumerate(zip(ready[1:], sent)):
        box(axis, start, feet[1], end - start, LANE, COMMUNICATION, f"{number + 1}", color="white")
    return figure


def horovod_layers():
    """Horovod's layers on two ranks, and how the gradients that both have ready are fused. The lengths are made up."""
    figure, axis = canvas(5.6, "Horovod, from your script to the network", "schematic, not measured")
    ready, length = ((4, 3, 2, 1), (4, 3, 2)), {4: 0.65, 3: 0.45, 2: 0.35, 1: 0.55}  # the layers' gradients
    agreed = [layer for layer in ready[0] if layer in ready[1]]
    columns, width, inside, bar = (1.75, 5.4), 3.45, 2.95, 0.38
    across = columns[1] + width - columns[0]
    foot = {"script": 4.2, "interface": 3.51, "ready": 2.39, "agree": 1.72, "fuse": 1.05, "transport": 0.2}

    for row, text in zip(foot, ("your script", "interface", "1. ready here", "2. agreed", "3. fused", "transport")):
        style = {} if text[0].isdigit() else {"weight": "bold"}
        write(axis, EDGE, foot[row] + bar / 2 + 0.02, text, ha="left", **style)
    write(axis, EDGE, 2.98, "core", ha="left", weight="bold")
    for rank, (left, color) in enumerate(zip(columns, RANKS)):
        middle, x = left + width / 2, left + (width - inside) / 2
        write(axis, middle, 4.78, f"rank {rank}", weight="bold")
        box(axis, left, foot["script"], width, bar, color, "forward, backward, optimizer")
        box(axis, left, foot["interface"], width, bar, color, "PyTorch's or TensorFlow's")
        frame(axis, left, 0.88, width, 2.33, edgecolor=color, lw=3, zorder=1)
        write(axis, x, 2.98, "background thread", ha="left")
        arrow(axis, (middle, foot["script"]), (middle, foot["interface"] + bar))
        arrow(axis, (middle, foot["interface"]), (middle, 3.23))
        for start, end in (("agree", "fuse"), ("fuse", "transport")):
            arrow(axis, (middle, foot[start]), (middle, foot[end] + bar))
        apart = (inside - sum(length.values())) / (len(length) - 1)
        for place, layer in enumerate(length):
            start = x + sum(list(length.values())[:place]) + apart * place
            there = layer in ready[rank]
            box(axis, start, foot["ready"], length[layer], bar, color if there else ABSENT, f"{layer}" if there else "")
            if there:
                end = start + length[layer] / 2
                arrow(axis, (end, foot["ready"]), (end, foot["agree"] + bar))
        box(axis, x, foot["fuse"], inside, bar, ABSENT)
        for layer in agreed:
            box(axis, x, foot["fuse"], length[layer], bar, color, f"{layer}")
            x += length[layer]
        write(axis, (x + left + (width + inside) / 2) / 2, foot["fuse"] + bar / 2 + 0.02, "up to 128 MB")
    box(axis, columns[0] - 0.08, foot["agree"], across + 0.16, bar, COMMUNICATION,
        f"MPI or gloo: {', '.join(map(str, agreed))} are ready on both", color="white")
    box(axis, columns[0] - 0.08, foot["transport"], across + 0.16, bar, COMMUNICATION,
        "one all-reduce: NCCL on GPUs, otherwise MPI or gloo", color="white")
    return figure


def horovod_step():
    """One training step with Horovod on two ranks as a time line, with the gradients of four layers.

    A background thread wakes up in every cycle; what is ready on all ranks by then is all-reduced together. Rank 1 is
    a little slower, to show that rank 0 waits for it. The lengths are made up.
    """
    begin, cycle, length = 1.3, 0.6, {4: 0.5, 3: 0.45, 2: 0.5, 1: 0.85}  # of each layer's part of an all-reduce
    ready = ((2.4, 3.4, 4.1, 4.65, 6), (2.4, 3.65, 4.45, 4.85, 6.5))  # backward begins, has done layer 4, 3, 2, 1
    ticks = [begin + cycle * number for number in range(1, 13)]
    fused = {}  # the layers that are sent from each tick on
    for layer, times in zip(length, zip(*(one[1:] for one in ready))):
        fused.setdefault(next(tick for tick in ticks if tick >= max(times)), []).append(layer)
    sent = [(tick, tick + sum(length[layer] for layer in layers), " + ".join(map(str, layers)))
            for tick, layers in fused.items()]
    done = sent[-1][1]
    figure, axis, feet = time_line("One training step with Horovod", begin, 4.45)
    over = feet[0] + LANE + 0.2

    bracket(axis, ready[0][0], ready[0][-1], over, "backward, layer 4 to 1")
    bracket(axis, ready[0][-1], done, over, "exposed", weight="bold")
    write(axis, EDGE, feet[1] + LANE / 2 + 0.02, "all-reduce", ha="left")
    for tick in ticks:
        axis.plot([tick, tick], [feet[1], feet[1] + LANE], color=COMMUNICATION, lw=1.5, ls=":")
    for rank, (foot, times) in enumerate(zip(feet[::2], ready)):
        phase(axis, begin, times[0], foot, "forward")
        for layer, left, right in zip(length, times, times[1:]):
            phase(axis, left, right, foot, "backward", f"{layer}")
            joined(axis, right, feet, rank)
        box(axis, times[-1], foot, done - times[-1], LANE, ABSENT, "waits")
        phase(axis, done, END, foot, "optimizer")
        joined(axis, done, feet, rank, back=True)
    for start, end, name in sent:
        box(axis, start, feet[1], end - start, LANE, COMMUNICATION, name, color="white")
    write(axis, begin, 0.3, "dotted: a cycle begins; what is ready on both goes together", ha="left")
    return figure


def ring_all_reduce(ranks):
    """The steps of an all-reduce in a ring, and what each rank holds at the end.

    What is held is, by rank and chunk, the ranks whose parts are in the sum. A step is (what is held before it, the
    chunk that each rank sends to the next one). After Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009).
    """
    held, steps = [[(rank,)] * ranks for rank in range(ranks)], []
    for step in range(2 * (ranks - 1)):
        sends = [(rank - step) % ranks for rank in range(ranks)]
        steps.append((held, sends))
        held = [list(row) for row in held]
        for rank, chunk in enumerate(sends):
            following = held[(rank + 1) % ranks]
            kept = following[chunk] if step < ranks - 1 else ()  # reduce-scatter adds, all-gather replaces
            following[chunk] = kept + steps[-1][0][rank][chunk]
    return steps, held


def ring():
    """The ring all-reduce of four ranks at its start, at half time and at its end: who has whose parts, who sends what.

    A row is a rank, its four cells are its chunks, and a stripe in a cell is a rank's part of the chunk.
    """
    steps, end = ring_all_reduce(len(RANKS))
    half = len(steps) // 2
    figure, axis = canvas(4.6, f"Ring all-reduce: after {len(steps)} steps all {len(end)} ranks have the sum")
    cell, height, pitch, foot, lefts = 0.5, 0.38, 0.68, 0.77, (1.15, 4.15, 6.85)
    panels = (("reduce-scatter", "step 1: the next adds", *steps[0]),
              ("all-gather", f"step {half + 1}: the next keeps", *steps[half]),
              ("done", f"after step {len(steps)}", end, ()))
    rows = [foot + pitch * (len(RANKS) - 1 - rank) for rank in range(len(RANKS))]

    for rank, y in enumerate(rows):
        write(axis, EDGE, y + height / 2 + 0.02, f"rank {rank}", ha="left", weight="bold")
    for left, (title, text, held, sends) in zip(lefts, panels):
        write(axis, left, 3.94, title, ha="left", weight="bold")
        write(axis, left, 3.66, text, ha="left")
        for row, y in zip(held, rows):
            for chunk, parts in enumerate(row):
                for rank, color in enumerate(RANKS):
                    axis.add_patch(Rectangle((left + cell * (chunk + rank / len(RANKS)), y), cell / len(RANKS), height,
                                             facecolor=color if rank in parts else ABSENT))
                frame(axis, left + cell * chunk, y, cell, height, edgecolor="white", lw=3)
        for rank, chunk in enumerate(sends):
            x, y = left + cell * (chunk + 0.5), rows[rank]
            frame(axis, left + cell * chunk, y, cell, height, edgecolor="black", lw=2.5, zorder=4)
            if rank < len(RANKS) - 1:
                arrow(axis, (x, y), (x, rows[rank + 1] + height))
            else:  # around to rank 0
                way, top = left + cell * (len(RANKS) + 0.3 if chunk else -0.3), rows[0] + height
                axis.plot([x, x, way, way, x], [y, y - 0.14, y - 0.14, top + 0.22, top + 0.22], color=COMMUNICATION,
                          lw=2, solid_joinstyle="miter")
                arrow(axis, (x, top + 0.22), (x, top))
    write(axis, EDGE, 0.3, "each row: 4 chunks; each colour: one rank's part; frame: what a rank sends", ha="left")
    return figure


def deepspeed_step():
    """One step of DeepSpeed's engine on two ranks as a time line, with K = 2 micro-batches. The lengths are made up."""
    begin, forward, backward, reduce = 1.0, 1.1, 1.52, 1.35
    done = begin + 2 * (forward + backward)
    figure, axis, feet = time_line("One step of DeepSpeed's engine, ZeRO off", begin)
    over = feet[0] + LANE + 0.2

    bracket(axis, begin, done, over, "2 micro-batches: gradients add up, nothing is sent")
    bracket(axis, done, done + reduce, over, "exposed", weight="bold")
    for rank, foot in enumerate(feet[::2]):
        for number in range(2):
            left = begin + number * (forward + backward)
            phase(axis, left, left + forward, foot, "forward")
            phase(axis, left + forward, left + forward + backward, foot, "backward")
        box(axis, done, foot, reduce, LANE, ABSENT, "waits")
        phase(axis, done + reduce, END, foot, "optimizer")
        joined(axis, done, feet, rank)
        joined(axis, done + reduce, feet, rank, back=True)
    box(axis, done, feet[1], reduce, LANE, COMMUNICATION, "all-reduce", color="white")
    return figure


def zero_partition():
    """What each of four ranks holds under ZeRO's stages 0 to 3, in bytes a parameter, by chapter 5's formula."""
    formula, ranks = runpy.run_path(str(ROOT / "05_zero" / "accounting.py"))["formula"], len(RANKS)
    stages = [formula(stage, ranks, 1, 0, width=2, gathered=2, master=4, moments=8, keeps_gradients=True)
              for stage in range(4)]
    whole, left, byte, gap, bar, pitch = stages[0], 1.2, 0.33, 0.46, 0.145, 0.167

    figure, axis = canvas(4.6, f"ZeRO: what each of {ranks} ranks holds, in bytes a parameter")
    for stage, held in enumerate(stages):
        foot = 2.9 - 0.795 * stage
        write(axis, EDGE, foot + 2 * pitch, f"stage {stage}", ha="left", weight="bold")
        for rank, color in enumerate(RANKS):
            y, x = foot + pitch * (3 - rank), left
            for role in ROLES:
                length, part = byte * whole[role], byte * held[role]
                box(axis, x, y, length, bar, ABSENT)
                box(axis, x + (rank * part if part < length else 0), y, part, bar, color)
                if stage == rank == 0:
                    write(axis, x + length / 2, 3.98, role)
                    write(axis, x + length / 2, 3.73, f"{whole[role]:g}")
                x += length + gap
        every = sum(whole[role] for role in ROLES if held[role] == whole[role])
        shared = total(whole) - every
        terms = [f"{every:g}"] * (every > 0) + [f"{shared:g}/{ranks}"] * (shared > 0)
        write(axis, 8.4, foot + 2 * pitch + (0.13 if shared else 0), f"{total(held):g}", fontsize=TITLE, weight="bold")
        if shared:
            write(axis, 8.4, foot + 2 * pitch - 0.15, " + ".join(terms))
    write(axis, 8.4, 3.98, "sum of")
    write(axis, 8.4, 3.73, "one rank")
    legend(axis, left, 0.1, 1.15, [(f"rank {rank}", color) for rank, color in enumerate(RANKS)]
           + [("not on this rank", ABSENT)])
    return figure


def batch():
    """Which rank gets which of 20 images in two epochs, as DistributedSampler deals them out to three ranks.

    The order is the one that the sampler gives to a single rank, the colour tells whose sampler gives the image.
    """
    images, ranks, local, cell = 20, 3, 2, 0.352

    def dealt(ranks, rank, epoch):
        sampler = DistributedSampler(range(images), ranks, rank, shuffle=True, seed=0, drop_last=True)
        sampler.set_epoch(epoch)
        return list(sampler)

    figure, axis = canvas(3.5, f"{images} images, {ranks} ranks: a global batch of {ranks} x {local} in each step")
    for epoch, y in enumerate((2.05, 0.95)):
        write(axis, EDGE, y + cell / 2 + 0.02, f"epoch {epoch}", ha="left", weight="bold")
        color = {image: RANKS[rank] for rank in range(ranks) for image in dealt(ranks, rank, epoch)}
        for position, image in enumerate(dealt(1, 0, epoch)):
            step, place = divmod(position, ranks * local)
            x = 1.2 + cell * position + 0.18 * step
            box(axis, x, y, cell, cell, color.get(image, ABSENT), f"{image}")
            if place == 0:
                size = min(ranks * local, images - position)
                bracket(axis, x + 0.02, x + size * cell - 0.02, y + cell + 0.17,
                        f"step {step + 1}" if image in color else "left over")
    legend(axis, 1.2, 0.3, 1.2, [(f"rank {rank}", color) for rank, color in enumerate(RANKS[:ranks])]
           + [("waits for another epoch", ABSENT)])
    return figure


DRAWINGS = (parallelism, averaging, ddp_processes, ddp_step, horovod_layers, horovod_step, ring, deepspeed_step,
            zero_partition, batch)
