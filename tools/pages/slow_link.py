"""What 03_ddp/SLOW_LINK.md shows of the runs of tools/measuring/lab.py: predicted beside measured, words, a figure.

    python -m tools.pages.slow_link [FOLDER]       # tables and words of the records in assets/records, or there

Words are chosen by comparing the numbers, whatever these are. Before there are records, each says so.
"""

import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

import records
from matplotlib.lines import Line2D
from records import published

from tools.measuring import lab, lab_model
from tools.measuring.lab_model import PREDICTIONS, Predictions, cluster_of, cost_model, rate_of
from tools.measuring.slow_link import WAYS
from tools.pages import at_scale, style

COMMIT = "ec7659b"  # of tools/measuring/lab_model.py as it predicts; a test compares
AIM = 0.15
NEAR = 0.05  # what is called equal
NAMES = {("02_horovod/pytorch", None): "Horovod", ("03_ddp", None): "DDP", ("04_deepspeed", None): "DeepSpeed",
         ("05_zero", 1): "ZeRO 1", ("05_zero", 3): "ZeRO 3"}
COLORS = {name: style.LIBRARIES.get(name) for name in NAMES.values()} | {"ZeRO 1": style.STAGES[2],
                                                                         "ZeRO 3": style.STAGES[3]}
SPEEDS = {"none": "no limit", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
ALT = ("Images a second over nodes, measured and predicted, at no limit, 1 Gbit/s and 100 Mbit/s: above the cnn, below "
       "the perceptron of chapter 5.")


# --- the records ---

def summary(found: Iterable[dict]) -> list[dict]:
    """A row for each kind of run over the link: median, least and most images/s of its repeats, both predictions."""
    found = list(found)
    predictions, groups = Predictions(found), {}
    for record in found:
        if not record.get("at_once"):
            name = NAMES[record["chapter"], record.get("stage")]
            group = record["kind"], name, record.get("way"), record["nodes"], record["link"]
            groups.setdefault(group, []).append(record)
    rows = []
    for (kind, name, way, nodes, link), runs in groups.items():
        speeds = [run["images_per_second"] for run in runs]
        step = statistics.median(run["step_seconds"] for run in runs)
        sent = [run["sent_bytes"] for run in runs if run.get("sent_bytes") is not None]
        row = {"kind": kind, "name": name, "way": way, "nodes": nodes, "link": link, "runs": len(runs), "step": step,
               "measured": statistics.median(speeds), "least": min(speeds), "most": max(speeds),
               "sent": statistics.median(sent) if sent else None,
               "kept": predictions.compute(runs[0]) * (4 if way == "accumulate" else 1) / step}
        for prediction in PREDICTIONS:
            row[prediction] = predictions.images_per_second(runs[0], prediction)
            row[f"{prediction} error"] = row[prediction] / row["measured"] - 1
        rows.append(row)
    return rows


def read(place: Path, name: str) -> list[dict]:
    """Records; those of assets/records have to be of a commit."""
    if place == records.RECORDS:
        return published(name)
    return [json.loads(line) for line in (place / name).read_text().splitlines()]


def raw(place: Path) -> list[dict]:
    return read(place, "lab.jsonl")


def rows_of(place: Path) -> list[dict]:
    return summary(raw(place))


def reduced(place: Path) -> list[dict]:
    return read(place, "lab_allreduce.jsonl")


def errors(rows: Iterable[dict], prediction: str) -> list[float]:
    return [abs(row[f"{prediction} error"]) for row in rows]


# --- the tables ---

def assumed() -> str:
    """What is run, and what the predictions assume; needs no records."""
    plan = lab.plan()
    chapters = [(name, lab.batch_of(chapter), lab.BYTES[chapter], lab_model.PASSED.get((chapter, stage), 1))
                for (chapter, stage), name in NAMES.items()]
    lines = [f"{'':18}images of a rank   bytes of gradients   bytes passed, of an all-reduce's   overlap"]
    for (chapter, _), (name, batch, size, passed) in zip(NAMES, chapters):
        overlap = "none" if chapter in lab_model.NO_OVERLAP else "with backward"
        lines.append(f"{name:18}{batch:16,}{size:21,}{passed:35.1f}   {overlap}")
    counts = ", ".join(f"{SPEEDS[link]}: {sum(run['link'] == link and 'alone' not in run['kind'] for run in plan)}"
                       for link in lab.LINKS)
    constants = cost_model.CENTRAL
    return "\n".join([*lines, "", f"runs over a link of {counts}; of ranks alone: "
                      f"{sum('alone' in run['kind'] for run in plan)}; {lab.STEPS} timed steps each; images of 32 x 32 "
                      "pixels",
                      f"of a link's nominal rate {constants.usable:.0%} is usable; jitter of V100s "
                      f"{constants.jitter:.1%}; aim: within {AIM:.0%}"])


def base(found: list[dict]) -> str:
    """What ranks alone take for a step, by how many there are at the same time."""
    predictions = Predictions(found)
    lines = [f"{'seconds of a step, alone':26}{'1 rank':>10}{'2 at once':>12}{'4 at once':>12}"]
    for (chapter, stage), name in NAMES.items():
        times = [predictions.base.get((None, chapter, stage, lab.batch_of(chapter), ranks)) for ranks in (1, 2, 4)]
        lines.append(f"{name:26}" + "".join(f"{'' if time is None else f'{time:.3f}':>{width}}"
                                            for time, width in zip(times, (10, 12, 12))))
    jitter = "".join(f"{predictions.jitter[ranks]:>12.1%}" for ranks in (2, 4) if ranks in predictions.jitter)
    return "\n".join([*lines, f"{'scatter of steps, DDP':36}{jitter}"])


def line(row: dict, name: str, width: int) -> str:
    spread = f"({row['least']:,.0f}..{row['most']:,.0f})" if row["runs"] > 1 else ""
    return (f"{name:{width}}{row['measured']:9,.0f} {spread:18}{row['kept']:6.0%}"
            + "".join(f"{row[prediction]:10,.0f} {row[f'{prediction} error']:+6.0%}" for prediction in PREDICTIONS))


def head(first: str, width: int) -> str:
    return (f"{first:{width}}{'images/s':>9} {'(least..most)':18}{'kept':>6}"
            + "".join(f"{name:>10} {'error':>6}" for name in PREDICTIONS))


def table(rows: list[dict], kind: str) -> str:
    """Weak or strong scaling."""
    lines = [head("", 34)]
    for link in lab.LINKS:
        for row in rows:
            if row["kind"] == kind and row["link"] == link:
                crowded = "*" if row["nodes"] == lab.NODES else " "
                lines.append(line(row, f"{SPEEDS[link]:11} {row['nodes']} nodes{crowded} {row['name']}", 34))
    return "\n".join(lines + ["* more ranks than cores"] * any(row["kind"] == kind and row["nodes"] == lab.NODES
                                                               for row in rows))


def ways(rows: list[dict]) -> str:
    """What helps DDP on two nodes."""
    lines = [head("", 46) + "  MB sent"]
    for link in lab.SLOW:
        for row in rows:
            if row["kind"] == "ways" and row["link"] == link:
                sent = "" if row["sent"] is None else f"{row['sent'] / 1e6:9.2f}"
                lines.append(line(row, f"{SPEEDS[link]:11} {WAYS[row['way']].said}", 46) + sent)
    return "\n".join(lines)


def counted(rows: list[dict]) -> str:
    """How far the predictions are off, in images/s."""
    lines = [f"{'':28}{'kinds of runs':>13}" + "".join(
        f"{f'{name}: median':>17}{'largest':>9}{f'within {AIM:.0%}':>12}" for name in PREDICTIONS)]
    for name, chosen in groups(rows).items():
        text = f"{name:28}{len(chosen):13}"
        for prediction in PREDICTIONS:
            found = errors(chosen, prediction)
            text += f"{statistics.median(found):17.0%}{max(found):9.0%}{sum(one <= AIM for one in found):12}"
        lines.append(text)
    return "\n".join(lines)


def groups(rows: list[dict]) -> dict[str, list[dict]]:
    """Two nodes by link and in all, and four nodes; those that there are."""
    two = [row for row in rows if row["nodes"] < lab.NODES]
    found = {f"two nodes, {SPEEDS[link]}": [row for row in two if row["link"] == link] for link in lab.LINKS}
    found |= {"two nodes, all": two, "four nodes, crowded": [row for row in rows if row["nodes"] == lab.NODES]}
    return {name: chosen for name, chosen in found.items() if chosen}


def wire(found: list[dict]) -> list[dict]:
    """Of each link, number of nodes and size: an all-reduce measured, by the cost model, and fitted to two nodes."""
    rows = []
    for link in lab.LINKS:
        here = [row for row in found if row["link"] == link]
        try:
            _, fitted = at_scale.lab(here, at_scale.BURST)
        except ValueError:  # no line through these
            fitted = {}
        for nodes, size in sorted({(row["nodes"], row["bytes"]) for row in here}):
            same = [row["seconds"] for row in here if (row["nodes"], row["bytes"]) == (nodes, size)]
            seconds = statistics.median(same)
            model = cost_model.all_reduce_seconds(size, cluster_of(nodes, link))
            rows.append({"link": link, "nodes": nodes, "bytes": size, "seconds": seconds, "model": model / seconds - 1,
                         "fitted": fitted.get((nodes, size)),
                         "share": 2 * (nodes - 1) / nodes * size / seconds / rate_of(link)})
    return rows


def wires(found: list[dict]) -> str:
    lines = [f"{'all-reduce':12}{'nodes':>6}{'bytes':>12}{'ms':>10}{'of nominal':>12}{'model':>8}{'fitted to 2':>13}"]
    for row in wire(found):
        if row["link"] != "none":
            fitted = "" if row["fitted"] is None else f"{row['fitted']:+.0%}"
            lines.append(f"{SPEEDS[row['link']]:12}{row['nodes']:6}{row['bytes']:12,}{1000 * row['seconds']:10.1f}"
                         f"{row['share']:12.0%}{row['model']:+8.0%}{fitted:>13}")
    return "\n".join(lines)


# --- the words ---

def times(ratio: float) -> str:
    """A ratio of speeds in words."""
    if abs(ratio - 1) <= NEAR:
        return "as fast"
    return f"{ratio:.2f} times as fast"


def verdict(rows: list[dict]) -> str:
    """How good the predictions on two nodes are, and what that says of the model."""
    two = groups(rows)["two nodes, all"]
    model = errors(two, "model")
    within = sum(one <= AIM for one in model)
    if within == len(two):
        text = f"The model as it stands meets its aim in all {len(two)} kinds of runs on two nodes"
    else:
        text = f"The model as it stands is within {AIM:.0%} in {within} of {len(two)} kinds of runs on two nodes"
    worst = max(two, key=lambda row: abs(row["model error"]))
    text += (f": the median error is {statistics.median(model):.0%}, the largest {max(model):.0%} ({worst['name']}, "
             f"{worst['kind']}, {SPEEDS[worst['link']]}). ")
    high = sum(row["model error"] > 0 for row in two)
    if 4 * high >= 3 * len(two):
        text += "It promises too much nearly everywhere. "
    elif 4 * high <= len(two):
        text += "It promises too little nearly everywhere. "
    else:
        text += "It errs to both sides. "
    return text + on_overlap([row for row in two if row["name"] in ("DDP", "Horovod")])


def on_overlap(overlapping: list[dict]) -> str:
    """Of each limited link by itself: what helps on one may harm on the other."""
    text = "Where backward overlaps (DDP, Horovod), network knows when each layer's gradients are ready:"
    for link in lab.SLOW:
        here = [row for row in overlapping if row["link"] == link]
        before, after = (statistics.median(errors(here, prediction)) for prediction in PREDICTIONS)
        text += f"{';' if link != lab.SLOW[0] else ''} at {SPEEDS[link]} that "
        if after < before - 0.01:
            text += (f"makes the median error smaller, {after:.0%} instead of {before:.0%} (gradients do not come at "
                     "the even pace that the model assumes)")
        elif after > before + 0.01:
            text += (f"makes the median error larger, {after:.0%} instead of {before:.0%} (part of what could overlap "
                     "does not)")
        else:
            text += f"changes little, {after:.0%} and {before:.0%}"
    return text + "."


def crowding(rows: list[dict]) -> str:
    four = groups(rows).get("four nodes, crowded")
    if not four:
        return "Four nodes were not run."
    low = sum(row["model error"] < 0 for row in four)
    middle = statistics.median(errors(four, "model"))
    text = f"On four nodes, with more ranks than cores, the median error is {middle:.0%}. "
    if 2 * low > len(four):
        return text + ("Most are faster than predicted: while one rank waits for the wire, another has its core. On a "
                       "cluster nobody does.")
    return text + "Most are slower than predicted: who waits for a core lets all others wait."


def best_way(rows: list[dict]) -> str:
    """Which way helps on each slow link."""
    text = []
    for link in lab.SLOW:
        here = {row["way"]: row["measured"] for row in rows if row["kind"] == "ways" and row["link"] == link}
        ratio = {way: speed / here["plain"] for way, speed in here.items()}
        best = max(ratio, key=ratio.get)
        words = f"At {SPEEDS[link]} "
        if ratio[best] <= 1 + NEAR:
            text.append(words + "nothing that was tried is clearly faster than main.py's way.")
            continue
        beside = times(ratio["batch"] / ratio["accumulate"])
        text.append(words + f"the most images a second come with: {WAYS[best].said}, {times(ratio[best])} as "
                    f"main.py's way. fp16 is {times(ratio['fp16'])}, one bucket for all {times(ratio['one'])}. Four "
                    "batches added up and one four times as large pass the same bytes for an image: the large one is "
                    f"{beside}.")
    same = lab_model.ready("DDP") == lab_model.ready("DDP, bucket")
    text.append("Buckets of 1 MB are, for this network, the same buckets: nearly all gradients are one tensor, which "
                "no bucket divides." if same else "Buckets of 1 MB divide this network's gradients otherwise.")
    return " ".join(text)


def stages(rows: list[dict]) -> str:
    """Stage 3 beside stage 1, weak scaling on two nodes."""
    speeds = {(row["name"], row["link"]): row["measured"]
              for row in rows if row["kind"] == "weak" and row["nodes"] == 2}
    ratios = {link: speeds["ZeRO 3", link] / speeds["ZeRO 1", link] for link in lab.LINKS}
    text = "; ".join(f"at {SPEEDS[link]} {times(ratio)}" for link, ratio in ratios.items())
    falls = ratios["100mbit"] < ratios["none"] * (1 - NEAR)
    return (f"Stage 3 beside stage 1: {text}. " + (
        "The slower the link, the more its bytes cost." if falls else
        "So it is not the link alone that makes the difference: more, smaller collectives cost without it, too."))


def on_the_wire(found: list[dict]) -> str:
    """What the all-reduces alone say of the model's `usable`."""
    large = [row for row in wire(found) if row["link"] != "none" and row["bytes"] >= cost_model.MB]
    two = [abs(row["model"]) for row in large if row["nodes"] == 2]
    shares = [row["share"] for row in large if row["nodes"] == 2]
    usable = cost_model.CENTRAL.usable
    text = (f"From a megabyte on, two nodes pass {min(shares):.0%} to {max(shares):.0%} of the nominal rate; the model "
            f"assumes {usable:.0%}. ")
    if max(two) <= AIM:
        return text + "So the wire is as the model has it, and what a step is off by comes from computing and overlap."
    return text + "So part of what a step is off by is the wire's."


def figure_line() -> str:
    return f"![{ALT}](../assets/figures/slow_link.png)"


# --- the figure ---

def draw(found: list[dict] | None = None) -> style.Picture:
    """Images/s over nodes: points measured, lines predicted by the model as it stands. found: other records."""
    found = raw(records.RECORDS) if found is None else found
    rows, predictions = summary(found), Predictions(found)
    figure, axes = style.picture(5.6, 2, 3, sharex=True, sharey="row")
    entries = {}
    for column, link in enumerate(lab.LINKS):
        for number, ((chapter, stage), name) in enumerate(NAMES.items()):
            axis, batch = axes[int(chapter == "05_zero"), column], lab.batch_of(chapter)
            beside = 0.12 * (number - (3.5 if chapter == "05_zero" else 1))  # or the points would hide each other
            lone = predictions.base.get((None, chapter, stage, batch, 1))
            chosen = sorted((row for row in rows if (row["kind"], row["name"], row["link"]) == ("weak", name, link)),
                            key=lambda row: row["nodes"])
            if lone is None or not chosen:
                continue
            places = [1 + beside, *(row["nodes"] + beside for row in chosen)]
            axis.plot(places, [batch / lone, *(row["model"] for row in chosen)], color=COLORS[name], ls="--", lw=1.5)
            axis.plot([1 + beside], [batch / lone], "o", color=COLORS[name])
            for row in chosen:
                crowded = {"markerfacecolor": "white", "markeredgewidth": 2} if row["nodes"] == lab.NODES else {}
                axis.plot([row["nodes"] + beside], [row["measured"]], "o", color=COLORS[name], zorder=3, **crowded)
            entries[name] = Line2D([], [], color=COLORS[name], lw=4)
        axes[0, column].set_title(SPEEDS[link])
        axes[1, column].set(xlabel="nodes", xticks=(1, 2, 4), xlim=(0.6, 4.4))
    for axis, what in zip(axes[:, 0], ("cnn", "perceptron")):
        axis.set(ylabel=f"{what},\nimages/s", ylim=(0, None))
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.locator_params(axis="y", nbins=4)
    black = {"color": style.MEASURED}
    entries |= {"measured": Line2D([], [], marker="o", ls="", **black), "predicted": Line2D([], [], ls="--", **black)}
    two = groups(rows)["two nodes, all"]
    within = sum(one <= AIM for one in errors(two, "model"))
    style.head(figure, f"Slow links: {within} of {len(two)} predictions for two nodes are within {AIM:.0%}", entries,
               handlelength=0.9, columnspacing=0.8, handletextpad=0.3)
    style.foot(figure, "One rank a node of submit/lab.sh, all on one machine. Hollow: more ranks than cores")
    return figure


# --- for docs.py and figures.py ---

def shown(make: Callable, load: Callable) -> Callable[[], str]:
    """What make() says of the records."""
    return lambda: make(load(records.RECORDS))


TABLES = {"base": (base, raw), "weak": (lambda rows: table(rows, "weak"), rows_of),
          "strong": (lambda rows: table(rows, "strong"), rows_of), "ways": (ways, rows_of),
          "errors": (counted, rows_of), "wire": (wires, reduced)}
WORDS = {"verdict": (verdict, rows_of), "crowding": (crowding, rows_of), "best": (best_way, rows_of),
         "stages": (stages, rows_of), "wire": (on_the_wire, reduced)}
TEXTS = {"assumed": assumed} | {name: shown(*pair) for name, pair in TABLES.items()}


def said(name: str) -> str:
    """A paragraph of the page: `slow NAME`, in lines of a page's width."""
    if name == "figure":
        return figure_line()
    make, load = WORDS[name]
    return textwrap.fill(make(load(records.RECORDS)), 120, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else records.RECORDS
    print(assumed())
    for name, (make, load) in [*TABLES.items(), *WORDS.items()]:
        print(f"\n--- {name} ---\n{make(load(place))}")


if __name__ == "__main__":
    main()
