"""The READMEs' drawings: what the ranks hold, what they send when, which images they get.

A colour is a rank, dark grey is communication and light grey is what takes no part. A drawing has one axis, whose unit
is an inch, so that 1 there is 1 on paper. Numbers, shares and bucket sizes in it are computed, not typed.
"""

import runpy

import torch
import torch.distributed as dist
from launch import ROOT
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.utils.data import DistributedSampler
from torchvision.models import get_model

from tools.measuring.zero import ROLES, total

RANKS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7")  # Okabe and Ito's: the colour-blind tell them apart, too
COMMUNICATION = "#404040"
ABSENT = "#E6E6E6"
POINTS = (((1, 2), (5, 6)), ((2, 5), (3, 5)), ((4, 6), (2, 3)), ((3, 1), (1, 3)))  # (x, y) of averaging(), by rank
WEIGHT, RATE = 1.0, 0.1


def canvas(height, title="", note=""):
    """A figure 11 inches wide with a headline, and an axis over it that counts inches from the lower left corner.

    It is opaque: on a dark page, too, it can be read.
    """
    figure = Figure(figsize=(11, height), facecolor="white")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, 11), ylim=(0, height))
    axis.axis("off")
    write(axis, 0.2, height - 0.3, title, ha="left", fontsize=14, weight="bold")
    write(axis, 10.8, height - 0.3, note, ha="right", style="italic")
    return figure, axis


def write(axis, x, y, text, **style):
    """Text with its middle at (x, y), unless the style says otherwise."""
    axis.text(x, y, text, **{"ha": "center", "va": "center_baseline", "fontsize": 11, "linespacing": 1.3} | style)


def box(axis, x, y, width, height, fill, label="", **style):
    """A filled rectangle with its lower left corner at (x, y) and a label in its middle; the style is the label's."""
    axis.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor="white"))
    write(axis, x + width / 2, y + height / 2 + 0.02, label, **style)


def frame(axis, x, y, width, height, **style):
    """The outline of a rectangle with its lower left corner at (x, y)."""
    line = {"fill": False, "edgecolor": COMMUNICATION, "lw": 1.5, "zorder": 3}
    axis.add_patch(Rectangle((x, y), width, height, **line | style))


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
    figure, axis = canvas(5.5)
    panels = [  # what is split, holds, sends
        ("the batch is split", "the whole model,\na quarter of the batch",
         "gradients: averaged over the\nranks (all-reduce) in every step"),
        ("Pipeline: the model is split by layers",
         "one layer; only rank 0 the\nimages, only rank 3 the labels",
         "activations to the next rank,\ngradients (dashed) back"),
        ("Tensor: each layer is split", "a quarter of each layer,\nthe whole batch",
         "partial results: all-reduced\nafter each pair of layers")]
    width, height, floor, cell = 0.6, 0.34, 2.45, 0.15  # a layer's size, the foot of layer 1, a cell of the batch
    for number in range(4):
        write(axis, 0.8, floor + 0.45 * number + height / 2, f"layer {number + 1}", ha="right")
    write(axis, 0.8, 1.72 + 2 * cell, "batch", ha="right")
    for left, right, title in ((0.95, 3.95, "Data parallel"), (4.35, 10.75, "Model parallel")):
        write(axis, left, 5.28, title, ha="left", fontsize=14, weight="bold")
        axis.plot([left, right], [5.12, 5.12], color=COMMUNICATION, lw=1.2)
    write(axis, 0.95, 0.18, "Grey: not on this rank.", ha="left", fontsize=10)

    for panel, (title, holds, sends) in enumerate(panels):
        left = 0.95 + 3.4 * panel
        columns = [left + 0.8 * rank for rank in range(4)]
        write(axis, left, 4.94, title, ha="left")
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
                for number in (1, 3):  # after the second layer of each pair
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
            return left + 0.08 + 0.25 * x, 3.13 + 0.185 * y

        box(axis, left, 3.1, width, 1.3, "#F5F5F5")
        axis.plot(*zip(place(0, 0), place(5.2, 5.2 * WEIGHT)), color=COMMUNICATION, lw=1.5, zorder=3)
        for rank, points in parts:
            for x, y in points:
                axis.plot(*zip(place(x, WEIGHT * x), place(x, y)), color=RANKS[rank], lw=2, zorder=2)
                axis.plot(*place(x, y), "o", color=RANKS[rank], ms=7, zorder=4)

    figure, axis = canvas(5.5, "Averaging gradients: four ranks take the step of one", "an example with made-up points")
    own, whole = [gradient(WEIGHT, points) for points in POINTS], gradient(WEIGHT, sum(POINTS, ()))
    average = sum(own) / len(own)
    width, bar, columns, alone = 1.42, 0.36, [2.1 + 1.66 * rank for rank in range(4)], 9.38
    terms = " + ".join(map(number, own)).replace("+ \N{MINUS SIGN}", "\N{MINUS SIGN} ")

    for y, text in ((3.75, f"each its own points (x, y),\nall the same line w x:\nw = {number(WEIGHT)}"),
                    (2.6, "own gradient: the\nmean of x (w x \N{MINUS SIGN} y)"),
                    (1.95, "every rank sends,\nevery rank gets"), (1.3, "average gradient"),
                    (0.54, f"w after the step, with\nlearning rate {number(RATE)}")):
        write(axis, 0.2, y, text, ha="left", va="center", fontsize=10)
    for rank, (left, color) in enumerate(zip(columns, RANKS)):
        write(axis, left + width / 2, 4.58, f"rank {rank}", weight="bold")
        plot(left, [(rank, POINTS[rank])])
        for foot, value in ((2.42, own[rank]), (1.12, average), (0.36, WEIGHT - RATE * average)):
            box(axis, left, foot, width, bar, color, number(value), fontsize=13)
        for start, end in ((3.07, 2.81), (2.4, 2.15), (1.76, 1.51), (1.1, 0.75)):
            arrow(axis, (left + width / 2, start), (left + width / 2, end))
    box(axis, columns[0], 1.77, columns[3] + width - columns[0], bar, COMMUNICATION,
        f"all-reduce: ({terms}) / {len(own)} = {number(average)}", color="white")

    write(axis, alone + width / 2, 4.68, "one rank with\nthe whole batch", weight="bold")
    plot(alone, enumerate(POINTS))
    for foot, value, start, end in ((1.12, whole, 3.07, 1.51), (0.36, WEIGHT - RATE * whole, 1.1, 0.75)):
        frame(axis, alone, foot, width, bar)
        write(axis, alone + width / 2, foot + bar / 2 + 0.02, number(value), fontsize=13)
        arrow(axis, (alone + width / 2, start), (alone + width / 2, end))
        write(axis, (columns[3] + width + alone) / 2, foot + bar / 2, "=", fontsize=18, weight="bold")
    return figure


def buckets(model):
    """Bytes of each parameter, by bucket of DDP, in the order in which backward fills them from the second step on.

    Computed by DDP's own function, with its defaults: the gradients of the last parameters are ready first.
    """
    parameters = list(model.parameters())[::-1]
    found, _ = dist._compute_bucket_assignment_by_size(parameters, [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20])
    return [[parameters[index].nbytes for index in bucket] for bucket in found]


def ddp_processes():
    """What each of four processes of DDP has: its images, the whole model, buckets of gradients, drawn to scale."""
    with torch.device("meta"):  # sizes without memory
        model = get_model("resnet18", num_classes=10)
    filled = [(sum(bucket), max(bucket)) for bucket in buckets(model)]
    layers = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in reversed(list(model.children()))]
    figure, axis = canvas(5.6, "DistributedDataParallel: what each process has, and what goes between them")
    columns, width, inside, bar = [1.9 + 2.3 * rank for rank in range(4)], 2.0, 1.7, 0.32
    scale = inside / sum(layers)

    box(axis, columns[0], 4.6, columns[3] + width - columns[0], bar, ABSENT,
        "mpiexec, srun or torchrun starts the processes, one a GPU; DDP starts none")
    for y, text in ((4.76, "launcher"), (3.46, "images, dealt out by\nDistributedSampler"),
                    (2.65, f"model, last layer first:\nResNet-18, {sum(layers) / 1e6:.1f} MB,\nwhole on each rank"),
                    (2.14, f"gradients: {len(filled)} buckets"), (1.48, "process group"), (0.92, "optimizer")):
        write(axis, 0.2, y, text, ha="left", va="center", fontsize=10)
    for rank, (left, color) in enumerate(zip(columns, RANKS)):
        middle, x = left + width / 2, left + (width - inside) / 2
        arrow(axis, (middle, 4.58), (middle, 4.23))
        frame(axis, left, 0.65, width, 3.55, edgecolor=color, lw=2.5, zorder=1)
        write(axis, middle, 3.98, f"process of rank {rank}", weight="bold")
        for place, image in enumerate(DistributedSampler(range(16), 4, rank)):
            box(axis, x + inside / 4 * place, 3.3, inside / 4, bar, color, f"{image}")
        frame(axis, left + 0.07, 1.9, width - 0.14, 1.23, lw=1, ls="--")
        write(axis, middle, 2.99, "DDP(model)", fontsize=10)
        for place, size in enumerate(layers):
            box(axis, x + scale * sum(layers[:place]), 2.49, scale * size, bar, color)
        for size, _ in filled:
            box(axis, x, 1.98, scale * size, bar, COMMUNICATION, f"{size / 1e6:.1f}", color="white", fontsize=10)
            arrow(axis, (x + scale * size / 2, 1.88), (x + scale * size / 2, 1.66), "<->")
            x += scale * size
        arrow(axis, (middle, 1.3), (middle, 1.1))
        box(axis, middle - inside / 2, 0.76, inside, bar, color, "the same step", fontsize=10)
    box(axis, columns[0] - 0.06, 1.32, columns[3] + width - columns[0] + 0.12, bar, COMMUNICATION,
        "an all-reduce of each bucket as soon as it is full: NCCL between GPUs, gloo between CPUs", color="white")
    write(axis, columns[0], 0.42, "Buckets in MB. The first is full at about 1 MB, the others at about 25 MB, but no "
          f"tensor is cut:\nthe last convolution alone has {filled[0][1] / 1e6:.1f} MB. "
          "(In the very first step there is a single bucket.)", ha="left", va="top", fontsize=10)
    return figure


def ddp_step():
    """One training step of DistributedDataParallel on two ranks as a time line, with three buckets of gradients.

    An all-reduce starts when backward has the gradients of its bucket, and runs beside the rest of backward. It joins
    the ranks, so their lanes for it lie side by side. The lengths are made up.
    """
    figure, axis = canvas(4.6, "One training step with DistributedDataParallel", "schematic, not measured")
    ready = [1.75 + 0.6 * time for time in (3.4, 4.6, 7.6, 10.4)]  # backward begins, has done bucket 1, 2, 3
    sent = [1.75 + 0.6 * time for time in (5.2, 9.9, 12.6)]  # the end of each all-reduce
    begin, end, bar = 1.75, 10.4, 0.45
    compute, reduce = (3.05, 0.8), (2.3, 1.55)  # the feet of each rank's two lanes

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


def horovod_layers():
    """Horovod's layers on two ranks, and how the gradients that both have ready are fused. The lengths are made up."""
    figure, axis = canvas(6.3, "Horovod's layers, from your script down to the network", "schematic, not measured")
    ready, length = ((4, 3, 2, 1), (4, 3, 2)), {4: 1.1, 3: 0.7, 2: 0.45, 1: 0.9}  # the layers' gradients
    agreed = [layer for layer in ready[0] if layer in ready[1]]
    columns, width, inside, bar = (2.25, 6.75), 4.05, 3.65, 0.36
    across, half = columns[1] + width - columns[0], (width - 0.1) / 2

    for y, text in ((5.18, "your script"), (4.55, "interface"), (3.8, "core"), (0.98, "transport")):
        write(axis, 0.2, y, text, ha="left", weight="bold")
    for y, text in ((4.32, "one for each framework"), (3.57, "in every cycle:"), (3.2, "1. what is ready here"),
                    (2.57, "2. agree on what is\n    ready on all ranks"), (1.94, "3. fuse it in a buffer")):
        write(axis, 0.2, y, text, ha="left", va="center", fontsize=10)
    for rank, (left, color) in enumerate(zip(columns, RANKS)):
        middle, x = left + width / 2, left + (width - inside) / 2
        write(axis, middle, 5.56, f"rank {rank}", weight="bold")
        box(axis, left, 5.0, width, bar, color, "forward, backward, optimizer")
        for place, text in enumerate(("PyTorch:\nDistributedOptimizer", "TensorFlow:\nDistributedGradientTape")):
            box(axis, left + place * (half + 0.1), 4.2, half, 0.5, color, text, fontsize=10)
        frame(axis, left, 1.6, width, 2.34, edgecolor=color, lw=2.5, zorder=1)
        write(axis, x, 3.7, "background thread", ha="left", fontsize=10)
        for start, end in ((4.98, 4.73), (4.18, 3.4), (3.0, 2.77), (2.37, 2.14), (1.74, 1.18)):
            arrow(axis, (middle, start), (middle, end))
        apart = (inside - sum(length.values())) / (len(length) - 1)
        for place, layer in enumerate(length):
            there, before = layer in ready[rank], sum(list(length.values())[:place])
            box(axis, x + before + apart * place, 3.02, length[layer], bar, color if there else ABSENT,
                f"{layer}" if there else "")
        box(axis, x, 1.76, inside, bar, ABSENT)
        for layer in agreed:
            box(axis, x, 1.76, length[layer], bar, color, f"{layer}")
            x += length[layer]
        write(axis, (x + left + (width + inside) / 2) / 2, 1.96, "up to 128 MB", fontsize=10)
    box(axis, columns[0] - 0.06, 2.39, across + 0.12, bar, COMMUNICATION,
        f"coordination, over MPI or gloo: {', '.join(map(str, agreed))} are ready on both", color="white")
    box(axis, columns[0] - 0.06, 0.8, across + 0.12, bar, COMMUNICATION,
        "one all-reduce of the buffer: NCCL on GPUs, otherwise MPI or gloo", color="white")
    write(axis, columns[0], 0.58, "Then the gradients are divided by the number of ranks and copied out of the buffer."
          "\nGradient 1 is not ready on rank 1 yet, and waits for a later cycle.", ha="left", va="top", fontsize=10)
    return figure


def horovod_step():
    """One training step with Horovod on two ranks as a time line, with the gradients of four layers.

    A background thread wakes up in every cycle; what is ready on all ranks by then is all-reduced together. Rank 1 is
    a little slower, to show that rank 0 waits for it. The lengths are made up.
    """
    figure, axis = canvas(4.6, "One training step with Horovod", "schematic, not measured")
    begin, end, bar, cycle = 1.75, 10.4, 0.45, 0.62
    ready = ((3.3, 4.5, 5.2, 5.9, 7.2), (3.3, 4.75, 5.6, 6.05, 7.6))  # backward begins, has done layers 4, 3, 2, 1
    compute, reduce = (3.05, 0.8), (2.3, 1.55)  # the feet of each rank's two lanes
    ticks = [begin + cycle * number for number in range(1, 12)]
    fused = [(next(tick for tick in ticks if tick >= max(one[last] for one in ready)), length, name)
             for last, length, name in ((1, 0.5, "4"), (3, 0.95, "3 + 2"), (4, 0.75, "1"))]
    done = fused[-1][0] + fused[-1][1]

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
    """The ring all-reduce of four ranks, step by step: who sends which chunk, and whose parts are in each sum."""
    steps, end = ring_all_reduce(4)
    figure, axis = canvas(6.6, f"Ring all-reduce: after {len(steps)} steps all {len(end)} ranks have the sum")
    cell, apart, down = 0.15, 1.45, 1.12  # a cell of a rank's grid; from rank to rank of a panel
    side = 4 * cell

    def grid(x, y, held, cell):
        """A rank's chunks from left to right, and in each from top to bottom the parts of the four ranks."""
        for chunk, parts in enumerate(held):
            for rank, color in enumerate(RANKS):
                box(axis, x + cell * chunk, y + cell * (3 - rank), cell, cell, color if rank in parts else ABSENT)

    def panel(left, foot, title, held, sends):
        """The four ranks clockwise, what each holds, and the chunk that it sends to the next one."""
        corners = ((left, foot + down), (left + apart, foot + down), (left + apart, foot), (left, foot))
        ways, middle = ((1, 0), (0, -1), (-1, 0), (0, 1)), side / 2
        write(axis, left + apart / 2 + middle, foot + 2.1, title, weight="bold")
        for rank, (x, y) in enumerate(corners):
            grid(x, y, held[rank], cell)
            write(axis, x + middle, y + (side + 0.14 if rank < 2 else -0.15), f"rank {rank}", fontsize=10)
        for rank, chunk in enumerate(sends):
            (x, y), (next_x, next_y), (right, up) = corners[rank], corners[(rank + 1) % 4], ways[rank]
            frame(axis, x + cell * chunk, y, cell, side, edgecolor="black", lw=2)
            start = x + middle + right * (middle + 0.06), y + middle + up * (middle + 0.06)
            end = next_x + middle - right * (middle + 0.06), next_y + middle - up * (middle + 0.06)
            arrow(axis, start, end)
            write(axis, (start[0] + end[0]) / 2 + 0.35 * up, (start[1] + end[1]) / 2 + 0.15 * abs(right),
                  f"chunk {chunk}", fontsize=10)

    feet = (3.4, 0.4)
    for foot, text in zip(feet, ("reduce-scatter: the next rank adds its own part to what it gets",
                                 "all-gather: the next rank keeps the finished sum, and passes it on")):
        bracket(axis, 0.25, 7.7, foot + 2.32, text)
    for number, (held, sends) in enumerate(steps):
        panel(0.25 + 2.7 * (number % 3), feet[number // 3], f"step {number + 1}", held, sends)
    panel(8.6, feet[1], "done", end, ())

    left, foot, large = 8.6, 4.36, 0.24  # how to read it
    write(axis, left, feet[0] + 2.38, "rank 1 in step 2, enlarged", ha="left", va="bottom")
    grid(left, foot, steps[1][0][1], large)
    frame(axis, left, foot, large, 4 * large, edgecolor="black", lw=2)
    write(axis, left + 4 * large + 0.1, foot + 4 * large + 0.14, "chunk", ha="left", fontsize=10)
    for number in range(4):
        write(axis, left + large * (number + 0.5), foot + 4 * large + 0.14, f"{number}", fontsize=10)
        write(axis, left + 4 * large + 0.1, foot + large * (3.5 - number), f"rank {number}'s part", ha="left",
              fontsize=10)
    write(axis, left, foot - 0.12, f"frame: sent in this step\n\nEach rank sends {len(steps)} chunks:\n"
          f"{len(steps) / len(end):g} times the whole.", ha="left", va="top", fontsize=10)
    return figure


def deepspeed_step():
    """One step of DeepSpeed's engine on two ranks as a time line, with K = 3 micro-batches. The lengths are made up."""
    figure, axis = canvas(4.2, "One step of DeepSpeed's engine with 3 micro-batches", "schematic, not measured")
    begin, forward, backward, reduce, optimizer, bar = 1.75, 0.75, 1.25, 1.35, 0.95, 0.45
    compute, lanes = (2.65, 0.85), (2.0, 1.5)  # the feet of each rank's two lanes
    done = begin + 3 * (forward + backward)

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


def zero_partition():
    """What each of four ranks holds under ZeRO's stages 0 to 3, in bytes a parameter, by chapter 5's formula."""
    formula, ranks = runpy.run_path(str(ROOT / "05_zero" / "accounting.py"))["formula"], len(RANKS)
    stages = [formula(stage, ranks, 1, 0, width=2, gathered=2, master=4, moments=8, keeps_gradients=True)
              for stage in range(4)]
    whole, left, byte, gap, bar = stages[0], 2.85, 0.4, 0.12, 0.2

    figure, axis = canvas(6, f"ZeRO: what each of {ranks} ranks holds, in bytes a parameter",
                          "mixed precision and Adam, by the formula")
    texts = ("nothing is shared out", "shared out: master copy\nand optimizer state", "and the gradients",
             "and the parameters")
    for stage, (held, text) in enumerate(zip(stages, texts)):
        foot = 3.82 - 1.13 * stage
        write(axis, 0.2, foot + 0.6, f"stage {stage}", ha="left", weight="bold")
        write(axis, 0.2, foot + 0.42, text, ha="left", va="top", fontsize=10)
        for rank, color in enumerate(RANKS):
            y, x = foot + 0.23 * (3 - rank), left
            write(axis, left - 0.1, y + bar / 2 + 0.02, f"rank {rank}", ha="right", fontsize=10)
            for role in ROLES:
                length, part = byte * whole[role], byte * held[role]
                box(axis, x, y, length, bar, ABSENT)
                box(axis, x + (rank * part if part < length else 0), y, part, bar, color)
                if stage == rank == 0:
                    write(axis, x + length / 2, 5.0, f"{role}\n{whole[role]:g} bytes", fontsize=10)
                x += length + gap
        every = sum(whole[role] for role in ROLES if held[role] == whole[role])
        shared = total(whole) - every
        terms = [f"{every:g} P"] * (every > 0) + [f"{shared:g} P/{ranks}"] * (shared > 0)
        write(axis, 9.75, foot + 0.55, f"{total(held):g} P", ha="left", fontsize=13, weight="bold")
        if shared:
            write(axis, 9.75, foot + 0.3, f"{' + '.join(terms)}", ha="left", fontsize=10)
    write(axis, 0.2, 0.2, "Grey: not on this rank. Stage 1 as in the paper; after backward DeepSpeed's holds no "
          "more gradients than stage 2.", ha="left", fontsize=10)
    write(axis, 9.75, 5.0, "on a rank, of\nP parameters", ha="left", fontsize=10)
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

    figure, axis = canvas(3.6, f"{images} images for {ranks} ranks, {local} for each rank in each step: "
          f"a global batch of {ranks * local}")
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


DRAWINGS = (parallelism, averaging, ddp_processes, ddp_step, horovod_layers, horovod_step, ring, deepspeed_step,
            zero_partition, batch)
