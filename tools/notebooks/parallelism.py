"""What 03_ddp/model_vs_data_parallelism.ipynb counts and draws: one network, shared between ranks in three ways.

The counts are those of three_ways.py on real ranks; the schematic figures and the formulae are made here.
"""

import json
import shlex
import subprocess
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import NamedTuple

from launch import ROOT
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from tools.pages.style import (
    ABSENT,
    COMMUNICATION,
    IDEAL,
    MEASURED,
    PARALLEL,
    RANKS,
    SCHEDULES,
    STEP,
    TEXT,
    TITLE,
    Picture,
    picture,
)

NAMES = {"data": "data parallel", "tensor": "tensor parallel", "pipeline": "pipeline"}
HELD = ("parameters", "activations", "images", "labels")
PIXELS, CLASSES, BYTES = 64, 10, 8  # of an image; of the last layer; of a number in fp64
TOLERANCE = 1e-12  # of three_ways.py
TWICE = {"images": "the images", "sequence": "the sequence", "width": "the width", "layers": "the layers",
         "ranks": "the ranks"}
START = {"images": 64, "sequence": 1, "width": 256, "layers": 4, "ranks": 2}  # three_ways.py's on two ranks


class Run(NamedTuple):
    """What three_ways.py printed, and its records: first that of one process alone, then one of each way and rank."""
    text: str
    records: list[dict]


@cache
def run(command: str) -> Run:
    """Run a command that starts three_ways.py, in its folder; the same command is run once only."""
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        done = subprocess.run([*shlex.split(command), "--results", results], cwd=ROOT / "03_ddp", capture_output=True,
                              text=True)
        if done.returncode:
            raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr.strip()}")
        return Run(done.stdout, [json.loads(line) for line in results.read_text().splitlines()])


def of(records: list[dict], way: str) -> list[dict]:
    """The records of a way, in the order of the ranks."""
    return sorted((record for record in records if record["way"] == way), key=lambda record: record["rank"])


def ways(records: list[dict]) -> list[str]:
    """The ways that were run, in their order, without the one process alone."""
    return list(dict.fromkeys(record["way"] for record in records if record["way"] != "alone"))


def last_step(record: dict) -> int:
    """The bytes that a rank has handed over in its last step."""
    return sum(size for _, size in record["sent"][-1])


def same_training(records: list[dict]) -> str:
    """For each way, whether its losses and parameters are those of one process."""
    lines = []
    for way in ways(records):
        same = all(record["difference"] <= TOLERANCE for record in of(records, way))
        verdict = "as in one process" if same else "NOT those of one process"
        lines.append(f"{NAMES.get(way, way):16}losses of {len(of(records, way)[0]['sent'])} steps, and all parameters "
                     f"at the end: {verdict}")
    return "\n".join(lines)


# What each rank holds

def held(records: list[dict]) -> Picture:
    """Bars: the part of the parameters, activations, images and labels of one process that each rank holds."""
    alone, = of(records, "alone")
    figure, axes = picture(3.6, 1, len(ways(records)), sharey=True)
    for axis, way in zip(axes, ways(records)):
        ranks = of(records, way)
        for record in ranks:
            place = [row + (record["rank"] + 0.5) / len(ranks) * 0.8 - 0.4 for row in range(len(HELD))]
            shares = [record[name] / alone[name] for name in HELD]
            bars = axis.barh(place, [100 * share for share in shares], 0.72 / len(ranks), color=RANKS[record["rank"]],
                             label=f"rank {record['rank']}")
            axis.bar_label(bars, [f"{share:.0%}" if share else "none" for share in shares], padding=4)
        axis.axvline(100, color=IDEAL, linewidth=1, zorder=0)
        axis.set(title=NAMES[way], xlim=(0, 160), xticks=[0, 50, 100], ylim=(len(HELD) - 0.5, -0.5))
    axes[0].set_yticks(range(len(HELD)), HELD)
    axes[1].set_xlabel("% of what one process holds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


def held_in_words(records: list[dict]) -> str:
    """Of tensor parallelism's activations, of how many micro-batches a pipeline holds, and of who meets data in it."""
    alone, = of(records, "alone")
    tensor, pipeline = of(records, "tensor"), of(records, "pipeline")
    kept = max(record["activations"] for record in tensor) / alone["activations"]
    even = 1 / len(tensor)
    more = "more than" if kept > even else "less than" if kept < even else "just"
    without = [f"rank {record['rank']} holds no {name}" for record in pipeline for name in ("images", "labels")
               if not record[name]]
    less = all(record["activations"] < even * alone["activations"] for record in pipeline)
    numbers = [in_flight(record["events"]) for record in pipeline]
    micro_batches = pipeline[0]["micro_batches"]
    holds = (f"its schedule (1F1B, below) holds at most {numbers[0]} of {micro_batches} micro-batches on rank 0, "
             f"{numbers[-1]} on rank {len(pipeline) - 1}")
    because = "The pipeline keeps less, because " if less and max(numbers) < micro_batches else "Of the pipeline, "
    return (f"A tensor-parallel rank keeps {kept:.0%} of the activations, {more} its share of {even:.0%}: what comes "
            f"out of a layer that is split by columns is split, what comes out of one that is split by rows is whole. "
            f"{because}{holds}; {', '.join(without) or 'every rank holds images and labels'}.")


def gradients_in_words(records: list[dict]) -> str:
    """How often data parallel ranks average gradients, and what is sent before the first step."""
    steps = of(records, "data")[0]["sent"]
    reduced = [sum(size for kind, size in step if kind == "all-reduce") for step in steps]
    every = "In each" if all(reduced) else f"In {sum(map(bool, reduced))}"
    broadcast = max((size for kind, size in of(records, "data")[0]["start"] if kind == "broadcast"), default=0)
    return (f"{every} of the {len(steps)} steps of this one epoch the ranks average {max(reduced):,} bytes of "
            f"gradients.\nBefore the first step rank 0 has broadcast {broadcast:,} bytes: its parameters.")


def partial_results_in_words(records: list[dict]) -> str:
    """Tensor parallelism's all-reduces of a step, in their order; batches of numbers in fp64."""
    record = of(records, "tensor")[0]
    batch = record["batch_size"]
    return "\n".join(f"{kind} of {size:,} bytes: {batch} images x {size // batch // BYTES} numbers x {BYTES} bytes"
                     for kind, size in record["sent"][-1])


# A pair of layers, tensor parallel

def box(axis: Axes, left: float, middle: float, width: float, height: float, color: str, text: str = "",
        **style: object) -> None:
    """A filled rectangle around the height `middle`, with a text in it."""
    axis.add_patch(Rectangle((left, middle - height / 2), width, height, facecolor=color,
                             **{"edgecolor": "white", "linewidth": 1} | style))
    axis.text(left + width / 2, middle, text, ha="center", va="center")


def drawing(height: float, title: str = "") -> tuple[Picture, Axes]:
    """A picture without axes' lines; its coordinates are inches."""
    figure, axis = picture(height, title=title)
    axis.set(xlim=(0, 9), ylim=(0, height - 0.1), aspect="equal")
    axis.axis("off")
    return figure, axis


def pair_of_layers() -> Picture:
    """y = relu(x A) B on two ranks: A split by columns, B by rows, one all-reduce of the partial results."""
    figure, axis = drawing(3.6)
    batch, pixels, hidden, outputs = 0.9, 0.6, 1.2, 0.85  # inches that stand for the matrices' sizes
    lefts = {"x": 1.0, "A": 1.85, "relu(x A)": 3.45, "B": 4.95, "partial y": 6.1, "y": 8.1}
    widths = {"x": pixels, "A": hidden, "relu(x A)": hidden, "B": outputs, "partial y": outputs, "y": outputs}
    for name, left in lefts.items():
        axis.text(left + widths[name] / 2, 3.3, name, ha="center", va="center", fontsize=TITLE, fontweight="bold")
    for rank, middle in enumerate((2.4, 1.0)):
        color, half = RANKS[rank], rank * hidden / 2
        axis.text(0, middle, f"rank {rank}", va="center")
        box(axis, lefts["x"], middle, pixels, batch, color)
        box(axis, lefts["A"], middle, hidden, pixels, ABSENT)
        box(axis, lefts["A"] + half, middle, hidden / 2, pixels, color)
        box(axis, lefts["relu(x A)"], middle, hidden, batch, ABSENT)
        box(axis, lefts["relu(x A)"] + half, middle, hidden / 2, batch, color)
        box(axis, lefts["B"], middle, outputs, hidden, ABSENT)
        box(axis, lefts["B"], middle + hidden / 4 - half, outputs, hidden / 2, color)
        box(axis, lefts["partial y"], middle, outputs, batch, color, hatch="//")
        box(axis, lefts["y"], middle, outputs, batch, color)
        for place, sign in {1.72: "·", 3.25: "→", 4.8: "·", 5.95: "=", 7.12: "→", 7.93: "→"}.items():
            axis.text(place, middle, sign, ha="center", va="center", fontsize=TITLE)
    axis.add_patch(Rectangle((7.3, 0.5), 0.45, 2.4, facecolor=COMMUNICATION))
    axis.text(7.525, 1.7, "all-reduce: sum", color="white", ha="center", va="center", rotation=90)
    for name, below in {"x": "whole", "A": "columns", "relu(x A)": "columns", "B": "rows", "partial y": "whole size",
                        "y": "whole"}.items():
        axis.text(lefts[name] + widths[name] / 2, 0.15, below, ha="center", va="center")
    return figure


# What each rank sends, and what makes it more

def arrows(records: list[dict]) -> Picture:
    """What two ranks send each other in a step: the thicker, the more bytes."""
    figure, axis = drawing(3.1)
    data, tensor, pipeline = (of(records, way) for way in NAMES)
    lines = [(data[0], "<|-|>", 2.55, "all-reduces of gradients"),
             (tensor[0], "<|-|>", 1.55, "all-reduces of partial results"),
             (pipeline[0], "-|>", 0.72, "sends of activations"),
             (pipeline[1], "<|-", 0.3, "sends of their gradients")]
    most = max(last_step(record) for record, *_ in lines)
    for record, shape, height, what in lines:
        size = last_step(record)
        thickness = 10 * size / most  # points
        axis.add_patch(FancyArrowPatch((2.9, height), (8.1, height), arrowstyle=shape, color=COMMUNICATION,
                                       mutation_scale=15 + 2 * thickness, linewidth=thickness, joinstyle="miter",
                                       capstyle="butt"))
        lower = record is pipeline[1]
        text = f"{len(record['sent'][-1])} {what}: {size / 1000:,.0f} kB"
        axis.text(5.5, height - 0.1 if lower else height + 0.14, text, ha="center", va="top" if lower else "bottom")
    for way, height in zip(NAMES, (2.55, 1.55, 0.51)):
        axis.text(0, height, NAMES[way], va="center")
        for rank, left in enumerate((2.0, 8.15)):
            box(axis, left, height, 0.85, 0.7, RANKS[rank], f"rank {rank}")
    return figure


def sizes(width: int, layers: int) -> list[tuple[int, int]]:
    """(inputs, outputs) of each linear layer of three_ways.py's network."""
    ends = [PIXELS, *[width] * (layers - 1), CLASSES]
    return list(zip(ends, ends[1:]))


def sent(way: str, images: int, sequence: int, width: int, layers: int, ranks: int) -> float:
    """The most bytes that a rank puts on the network in a step of that many images, each of `sequence` rows.

    An all-reduce is a ring: 2 (ranks - 1) / ranks times what is handed over. Tensor parallelism adds up in forward what
    each second layer gives, and in backward the gradients of what each other layer but the first gets.
    """
    rows, ring = images * sequence, 2 * (ranks - 1) / ranks
    if way == "data":
        return ring * BYTES * sum(inputs * outputs + outputs for inputs, outputs in sizes(width, layers))
    if way == "tensor":
        forward = sum(outputs for _, outputs in sizes(width, layers)[1::2])
        backward = sum(inputs for inputs, _ in sizes(width, layers)[2::2])
        return ring * BYTES * rows * (forward + backward)
    neighbours = 1 if ranks == 2 else 2
    return neighbours * BYTES * rows * width


def factor(way: str, what: str) -> float:
    """How many times as much a way sends, with twice of what."""
    return sent(way, **START | {what: 2 * START[what]}) / sent(way, **START)


def doubled(counted: list[dict], with_twice_the_images: list[dict]) -> Picture:
    """What each way sends in a step, and what it sends with twice of something; in bold what ranks have counted."""
    figure, axis = picture(3.9)
    tables = {0: counted, 1: with_twice_the_images}
    most = max(factor(way, what) for way in NAMES for what in TWICE)
    for column, way in enumerate(NAMES):
        start = max(map(last_step, of(counted, way)))
        for row, what in enumerate((None, *TWICE)):
            if row in tables:
                size = max(map(last_step, of(tables[row], way)))
            else:
                size = sent(way, **START | {what: 2 * START[what]})
            more = size / start
            shade = (more - 1) / (most - 1) if row else 0
            axis.add_patch(Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=PARALLEL[way],
                                     alpha=0.12 + 0.6 * max(0, min(1, shade))))
            text = f"{size / 1000:,.0f} kB" + (f"    x {more:.2g}" if row else "")
            axis.text(column, row, text, ha="center", va="center", fontweight="bold" if row in tables else "normal")
    axis.set(xlim=(-0.5, len(NAMES) - 0.5), ylim=(len(TWICE) + 0.5, -0.5))
    axis.set_xticks(range(len(NAMES)), NAMES.values(), fontsize=TITLE)
    axis.set_yticks(range(len(TWICE) + 1), ["as above", *(f"twice {name}" for name in TWICE.values())])
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return figure


def crossing(width: int, layers: int) -> float:
    """The rows in a step, images x sequence length, with which gradients and partial results are equally many bytes."""
    place = START | {"width": width, "layers": layers, "images": 1}
    return sent("data", **place) / sent("tensor", **place)


def growth(counted: list[dict], width: int, layers: int) -> Picture:
    """Bytes that a rank of two sends, against the rows in a step; points: what ranks have counted at this width."""
    figure, axis = picture(3.9)
    rows, ends = (8, 100_000), {}
    for way in NAMES:
        kilobytes = [sent(way, **START | {"images": each, "width": width, "layers": layers}) / 1000 for each in rows]
        axis.plot(rows, kilobytes, color=PARALLEL[way])
        ends[way] = kilobytes[1]
        points = {record["batch_size"]: last_step(record) / 1000 for record in counted
                  if record["way"] == way and (record["width"], START["layers"]) == (width, layers)}
        axis.plot(points.keys(), points.values(), "o", color=MEASURED, zorder=3)
    lowest = 0
    for way in sorted(ends, key=ends.get):  # the names do not overlap
        lowest = max(ends[way], 4 * lowest)
        axis.text(rows[1] * 1.15, lowest, NAMES[way], color=PARALLEL[way], va="center")
    equal = crossing(width, layers)
    axis.axvline(equal, color=IDEAL, linewidth=1.5, linestyle="--", zorder=0)
    axis.set_title(f"{layers} layers, {width:,} wide: data = tensor at {equal:,.0f} rows a step")
    axis.set(xscale="log", yscale="log", xlim=rows, ylim=(3, 1e9), ylabel="sent in a step",
             xlabel="rows in a step: images x sequence length")
    axis.set_xticks([10, 100, 1000, 10_000, 100_000], ["10", "100", "1,000", "10,000", "100,000"])
    axis.set_yticks([10, 1e3, 1e5, 1e7, 1e9], ["10 kB", "1 MB", "100 MB", "10 GB", "1 TB"])
    axis.minorticks_off()
    return figure


# The pipeline's timetables

def order(schedule: str, stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """What a stage does, one after the other: ("forward" or "backward", micro-batch).

    GPipe: all forward, then all backward. 1F1B: as many forward as there are stages from this one to the end; then one
    backward, one forward, in turn.
    """
    ahead = micro_batches if schedule == "GPipe" else min(micro_batches, stages - stage)
    events = [("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        events.append(("backward", number))
        if ahead + number < micro_batches:
            events.append(("forward", ahead + number))
    return events


def slots(orders: list[list]) -> dict[tuple[int, str, int], int]:
    """{(stage, kind, micro-batch): its slot}: the first in which the stage is free, and has received what it needs."""
    waiting, free, end = [list(events) for events in orders], [0] * len(orders), {}
    while any(waiting):
        for stage in range(len(orders)):
            for kind, number in waiting[stage][:1]:
                source = stage - 1 if kind == "forward" else stage + 1  # who sends what is needed
                received = end.get((source, kind, number)) if 0 <= source < len(orders) else 0
                if received is not None:
                    free[stage] = end[stage, kind, number] = max(free[stage], received) + 1
                    waiting[stage].pop(0)
    return {event: slot - 1 for event, slot in end.items()}


def in_flight(events: list) -> int:
    """The most micro-batches that a stage has sent through forward and not yet through backward."""
    return max(accumulate(1 if kind == "forward" else -1 for kind, _ in events))


def idle(table: dict, stages: int) -> float:
    """The share of the slots in which a stage waits."""
    return 1 - len(table) / (stages * (max(table.values()) + 1))


def timetables(stages: int, micro_batches: int) -> Picture:
    """Both schedules: forward, backward and waiting of each stage, and how many micro-batches it keeps at most."""
    share = (stages - 1) / (micro_batches + stages - 1)
    labelled = range(0, stages, 1 if stages <= 4 else stages - 1)  # of many only the first and the last
    title = f"Bubble: (p - 1) / (m + p - 1) = {stages - 1} / {micro_batches + stages - 1} = {share:.0%} of the slots"
    figure, axes = picture(4.3, 2, 1, title=title, sharex=True)
    for axis, schedule in zip(axes, SCHEDULES):
        orders = [order(schedule, stage, stages, micro_batches) for stage in range(stages)]
        table = slots(orders)
        length = max(table.values()) + 1
        axis.barh(range(stages), length, 0.9, left=-0.5, color=ABSENT)
        for (stage, kind, number), slot in table.items():
            axis.barh(stage, 0.92, 0.84, left=slot - 0.46, color=STEP[kind])
            if length <= 24 and stages <= 4:
                axis.text(slot, stage, number, ha="center", va="center_baseline",
                          color="black" if kind == "forward" else "white")
        for stage in labelled:
            axis.text(length * 1.01 - 0.5, stage, f"keeps {in_flight(orders[stage])}", va="center")
        axis.set_title(schedule, fontsize=TEXT)
        axis.set_title("micro-batches kept at most", loc="right", fontsize=TEXT)
        axis.set(xticks=[], xlim=(-0.5, length * 1.13 - 0.5), ylim=(stages - 0.5, -0.5))
        axis.set_yticks(labelled, [f"rank {stage}" for stage in labelled])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    legend = [Rectangle((0, 0), 1, 1, facecolor=color) for color in (STEP["forward"], STEP["backward"], ABSENT)]
    figure.legend(legend, ["forward", "backward", "waits"], loc="outside lower center", ncols=3)
    return figure


def bubble_in_words(stages: int, micro_batches: int) -> str:
    """What becomes of the bubble with that many micro-batches, a forward and a backward being two slots."""
    table = slots([order("1F1B", stage, stages, micro_batches) for stage in range(stages)])
    pairs = (max(table.values()) + 1) // 2
    return (f"Then move to {micro_batches}: {pairs - micro_batches}/{pairs} = {idle(table, stages):.0%}. More "
            f"micro-batches make the bubble smaller, more stages make it larger; it is the same under both schedules.")


def as_drawn(records: list[dict]) -> str:
    """Whether the stages have worked in the order of order(), and how much of the timetable that makes is idle."""
    lines = []
    for way, schedule in (("pipeline", "1F1B"), ("gpipe", "GPipe")):
        ranks = of(records, way)
        micro_batches = ranks[0]["micro_batches"]
        done = [[tuple(event) for event in record["events"]] for record in ranks]
        drawn = [order(schedule, stage, len(ranks), micro_batches) for stage in range(len(ranks))]
        verdict = "the drawn order" if done == drawn else "ANOTHER order than drawn"
        lines.append(f"{schedule:6}{len(ranks)} real ranks, {micro_batches} micro-batches: {verdict}; "
                     f"{idle(slots(done), len(ranks)):.0%} of the slots are idle")
    return "\n".join(lines)


def peaks(records: list[dict]) -> Picture:
    """The most bytes of activations that each stage of a pipeline keeps at a time, under both schedules."""
    figure, axis = picture(3.3)
    for (schedule, color), way, shift in zip(SCHEDULES.items(), ("pipeline", "gpipe"), (-0.2, 0.2)):
        ranks = of(records, way)
        kilobytes = [record["activations"] / 1000 for record in ranks]
        bars = axis.bar([record["rank"] + shift for record in ranks], kilobytes, 0.38, color=color, label=schedule)
        axis.bar_label(bars, [f"keeps {in_flight(record['events'])}" for record in ranks], padding=2)
    axis.set_xticks(range(len(ranks)), [f"rank {record['rank']}" for record in ranks])
    axis.set(ylabel="activations (kB)", title="on the bars: micro-batches kept at most")
    axis.margins(y=0.12)
    figure.legend(loc="outside upper right", ncols=2)
    return figure


# Data x tensor x pipeline

TENSOR, DATA, PIPELINE = 2, 2, 4  # ranks along each axis of the cube


def coordinates(rank: int) -> tuple[int, int, int]:
    """(tensor, data, pipeline) of a rank: neighbours in number are neighbours in the tensor group."""
    return rank % TENSOR, rank // TENSOR % DATA, rank // (TENSOR * DATA)


def groups(rank: int) -> dict[str, list[int]]:
    """{way: the ranks that communicate with this one in this way, and itself}: two coordinates are the same."""
    found = {}
    for axis, way in enumerate(("tensor", "data", "pipeline")):
        kept = [place for place in range(3) if place != axis]
        found[way] = [other for other in range(TENSOR * DATA * PIPELINE)
                      if all(coordinates(other)[place] == coordinates(rank)[place] for place in kept)]
    return found


def cube(rank: int) -> Picture:
    """16 ranks as a block of 2 x 2 x 4, and the three groups in which this rank communicates."""
    figure, axis = drawing(4)
    here, size = groups(rank), 0.62

    def middle(other: int) -> tuple[float, float]:
        tensor, data, pipeline = coordinates(other)
        return 0.45 + 2.2 * pipeline + 0.95 * tensor, 1.88 + 1.13 * data + 0.46 * tensor

    for way, width in (("pipeline", 3), ("data", 5), ("tensor", 9)):
        for group in {tuple(groups(other)[way]) for other in range(TENSOR * DATA * PIPELINE)}:
            mine = rank in group
            axis.plot(*zip(*map(middle, group)), color=PARALLEL[way] if mine else ABSENT,
                      linewidth=width if mine else 2, zorder=2 if mine else 1, solid_capstyle="butt")
    for other in range(TENSOR * DATA * PIPELINE):
        x, y = middle(other)
        ways_to = [way for way in here if other in here[way]]
        color = RANKS[0] if other == rank else "white" if ways_to else ABSENT
        edge = MEASURED if other == rank else PARALLEL[ways_to[0]] if ways_to else ABSENT
        axis.add_patch(Rectangle((x - size / 2, y - size / 2), size, size, facecolor=color, edgecolor=edge, linewidth=3,
                                 zorder=3))
        axis.text(x, y, other, ha="center", va="center", zorder=4)
    what = {"tensor": "all-reduces of partial results, in every pair of layers",
            "data": "all-reduces of gradients, once a step",
            "pipeline": "activations to the next stage, their gradients back"}
    tensor, data, pipeline = coordinates(rank)
    holds = f"rank {rank} holds part {tensor} of each layer of stage {pipeline}, for part {data} of the batch"
    axis.text(0.1, 1.28, holds, va="center", fontweight="bold")
    for height, (way, text) in zip((0.93, 0.58, 0.23), what.items()):
        members = ", ".join(str(other) for other in here[way])
        axis.text(0.1, height, f"{way} {members}: {text}", color=PARALLEL[way], va="center", fontweight="bold")
    return figure


# When to take which

DECISION = {  # of data, tensor and pipeline parallelism
    "holds": ("all layers, a part of the batch", "a part of each layer, the whole batch",
              "some layers; data only at the ends"),
    "sends": ("gradients, once a step", "partial results, for each pair of layers", "activations, and their gradients"),
    "grows with": ("parameters", "rows, width, layers", "rows, width"),
    "waits for it": ("the optimizer; backward can hide it", "the next layer, at once",
                     "the next stage; it has other micro-batches"),
    "take it when": ("the network fits, its training takes long",
                     "the network does not fit; ranks share a server's fast links",
                     "the network does not fit a server; its layers do")}


def decision() -> Picture:
    """The table of what each way holds, sends and waits for, and when it is taken."""
    figure, axis = drawing(3.9)
    lefts, height = (1.42, 3.96, 6.5), 0.64
    for left, (way, name) in zip(lefts, NAMES.items()):
        box(axis, left, 3.61, 2.46, 0.34, PARALLEL[way])
        axis.text(left + 1.23, 3.61, name, ha="center", va="center_baseline", color="white", fontweight="bold")
    for row, (what, texts) in enumerate(DECISION.items()):
        last = row == len(DECISION) - 1  # it is higher: three lines
        tall = 0.84 if last else height
        middle = 3.41 - height * row - tall / 2
        axis.text(1.32, middle, what, ha="right", va="center", fontweight="bold" if last else None)
        for left, way, text in zip(lefts, NAMES, texts):
            box(axis, left, middle, 2.46, tall - 0.05, PARALLEL[way], alpha=0.15)
            axis.text(left + 0.08, middle, fill(text, 22), va="center", linespacing=1.1)
    return figure
