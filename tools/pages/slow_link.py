"""The tables and the figure of 03_ddp/SLOW_LINK.md: the runs of tools/measuring/lab.py beside what was predicted.

    python -m tools.pages.slow_link [FOLDER]       # the tables of the records in assets/records, or in this folder
"""

import json
import sys
from functools import partial
from pathlib import Path

import pandas
from matplotlib.lines import Line2D
from records import RECORDS, published

from tools import style
from tools.measuring import lab
from tools.measuring.lab_model import PREDICTIONS, Predictions, cluster_of, cost_model, rate_of
from tools.measuring.slow_link import WAYS
from tools.pages import at_scale

AIM = 0.15
NAMES = {("02_horovod/pytorch", None): "Horovod", ("03_ddp", None): "DDP", ("04_deepspeed", None): "DeepSpeed",
         ("05_zero", 1): "ZeRO 1", ("05_zero", 3): "ZeRO 3"}
COLORS = {name: style.LIBRARIES.get(name) for name in NAMES.values()} | {"ZeRO 1": style.STAGES[2],
                                                                         "ZeRO 3": style.STAGES[3]}
SPEEDS = {"none": "no limit", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
ERRORS = [f"{prediction} error" for prediction in PREDICTIONS]
FORMATS = {"images/s": "{:,.0f}", "least": "{:,.0f}", "most": "{:,.0f}", "kept": "{:.0%}", "model": "{:,.0f}",
           "model error": "{:+.0%}", "network": "{:,.0f}", "network error": "{:+.0%}", "MB sent": "{:.2f}"}


def read(name: str, folder: Path = RECORDS) -> list[dict]:
    """The records of a file; those of assets/records have to be of a commit."""
    if folder == RECORDS:
        return published(name)
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def summary(found: list[dict]) -> pandas.DataFrame:
    """A row for each kind of run over the link: the median of its repeats, the least and the most, both predictions."""
    predictions = Predictions(found)
    runs = pandas.DataFrame([
        run | {"name": NAMES[run["chapter"], run.get("stage")], "way": run.get("way", "plain"),
               "alone": predictions.compute(run) * (4 if run.get("way") == "accumulate" else 1)}
        | {prediction: predictions.images_per_second(run, prediction) for prediction in PREDICTIONS}
        for run in found if not run.get("at_once")])
    groups = runs.groupby(["kind", "link", "nodes", "name", "way"], sort=False)
    speeds = groups["images_per_second"]
    rows = pandas.DataFrame({"images/s": speeds.median(), "least": speeds.min(), "most": speeds.max(),
                             "kept": groups["alone"].first() / groups["step_seconds"].median()})
    for prediction, error in zip(PREDICTIONS, ERRORS):
        rows[prediction] = groups[prediction].first()
        rows[error] = rows[prediction] / rows["images/s"] - 1
    rows["MB sent"] = groups["sent_bytes"].median() / 1e6
    return rows.reset_index().sort_values("link", key=lambda links: links.map(list(SPEEDS).index), kind="stable")


# --- the tables ---

def alone(found: list[dict]) -> str:
    """What ranks alone take for a step, by how many there are at the same time."""
    predictions, rows = Predictions(found), {}
    for (chapter, stage), name in NAMES.items():
        base = None, chapter, stage, lab.batch_of(chapter)
        rows[name] = {ranks: f"{predictions.base[*base, ranks]:.3f} s" for ranks in (1, 2, 4)
                      if (*base, ranks) in predictions.base}
    rows["scatter of DDP's"] = {ranks: f"{share:.1%}" for ranks, share in predictions.jitter.items()}
    table = pandas.DataFrame.from_dict(rows, orient="index").sort_index(axis=1)
    return table.rename(columns="{} at once".format).to_string(na_rep="")


def wire(reduced: list[dict]) -> str:
    """Of each link, number of nodes and size: an all-reduce measured, by the cost model, and fitted to two nodes."""
    rows = []
    for link in lab.SLOW:
        here = [record for record in reduced if record["link"] == link]
        _, fitted = at_scale.lab(here, at_scale.BURST)
        for (nodes, size), seconds in pandas.DataFrame(here).groupby(["nodes", "bytes"])["seconds"].median().items():
            share = 2 * (nodes - 1) / nodes * size / seconds / rate_of(link)
            model = cost_model.all_reduce_seconds(size, cluster_of(nodes, link)) / seconds - 1
            rows.append({"": SPEEDS[link], "nodes": nodes, "bytes": f"{size:,}", "ms": f"{1000 * seconds:.1f}",
                         "of nominal": f"{share:.0%}", "model": f"{model:+.0%}",
                         "fitted to 2": f"{fitted[nodes, size]:+.0%}"})
    return pandas.DataFrame(rows).to_string(index=False)


def table(found: list[dict], kind: str) -> str:
    """The rows of a kind of run: weak or strong scaling, or the ways that may help DDP."""
    rows = summary(found).query("kind == @kind").replace({"link": SPEEDS})
    rows.loc[rows["least"] == rows["most"], ["least", "most"]] = None  # a single run
    rows["nodes"] = rows["nodes"].map("{} nodes".format)
    index = ["link", "nodes", "name"]
    if kind == "ways":
        rows["way"] = [WAYS[way].said for way in rows["way"]]
        index = ["link", "way"]
    columns = [column for column in FORMATS if rows[column].notna().any()]
    return rows.set_index(index).rename_axis([None] * len(index))[columns].to_string(
        na_rep="", formatters={column: FORMATS[column].format for column in columns})


def errors(found: list[dict]) -> str:
    """How far the predictions are off, in images/s, over kinds of runs; four nodes have more ranks than cores."""
    rows = summary(found)
    two = rows[rows["nodes"] < lab.NODES]
    groups = {f"two nodes, {SPEEDS[link]}": two[two["link"] == link] for link in lab.LINKS}
    groups |= {"two nodes, all": two, "four nodes, crowded": rows[rows["nodes"] == lab.NODES]}
    counted = {}
    for name, chosen in groups.items():
        off = chosen[ERRORS].abs()
        counted[f"{name}: {len(chosen)} kinds of runs"] = pandas.concat({
            "median": off.median().map("{:.0%}".format), "largest": off.max().map("{:.0%}".format),
            f"within {AIM:.0%}": (off <= AIM).sum()})
    return pandas.DataFrame(counted).T.to_string()


TABLES = {"alone": ("lab.jsonl", alone), "wire": ("lab_allreduce.jsonl", wire),
          "weak": ("lab.jsonl", partial(table, kind="weak")), "strong": ("lab.jsonl", partial(table, kind="strong")),
          "ways": ("lab.jsonl", partial(table, kind="ways")), "errors": ("lab.jsonl", errors)}


def text(name: str, folder: Path = RECORDS) -> str:
    """A table of the records in a folder."""
    file, make = TABLES[name]
    return make(read(file, folder))


# --- the figure ---

def draw() -> style.Picture:
    """Images/s over nodes: points measured, lines predicted by the model as it stands."""
    found = read("lab.jsonl")
    rows, predictions = summary(found), Predictions(found)
    figure, axes = style.picture(5.6, 2, 3, sharex=True, sharey="row")
    entries = {}
    for column, link in enumerate(lab.LINKS):
        for number, ((chapter, stage), name) in enumerate(NAMES.items()):
            axis, batch = axes[int(chapter == "05_zero"), column], lab.batch_of(chapter)
            beside = 0.12 * (number - (3.5 if chapter == "05_zero" else 1))  # or the points would hide each other
            lone = batch / predictions.base[None, chapter, stage, batch, 1]
            weak = rows.query("kind == 'weak' and name == @name and link == @link").sort_values("nodes")
            places = [1 + beside, *(weak["nodes"] + beside)]
            axis.plot(places, [lone, *weak["model"]], color=COLORS[name], ls="--", lw=1.5)
            axis.plot(places, [lone, *weak["images/s"]], "o", color=COLORS[name])
            crowded = weak[weak["nodes"] == lab.NODES]
            axis.plot(crowded["nodes"] + beside, crowded["images/s"], "o", color=COLORS[name], markerfacecolor="white",
                      markeredgewidth=2)
            entries[name] = Line2D([], [], color=COLORS[name], lw=4)
        axes[0, column].set_title(SPEEDS[link])
        axes[1, column].set(xlabel="nodes", xticks=(1, 2, 4), xlim=(0.6, 4.4))
    for axis, what in zip(axes[:, 0], ("cnn", "perceptron")):
        axis.set(ylabel=f"{what},\nimages/s", ylim=(0, None))
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.locator_params(axis="y", nbins=4)
    black = {"color": style.MEASURED}
    entries |= {"measured": Line2D([], [], marker="o", ls="", **black), "predicted": Line2D([], [], ls="--", **black)}
    two = rows[rows["nodes"] < lab.NODES]
    within = (two["model error"].abs() <= AIM).sum()
    style.head(figure, f"Slow links: {within} of {len(two)} predictions for two nodes are within {AIM:.0%}", entries,
               handlelength=0.9, columnspacing=0.8, handletextpad=0.3)
    style.foot(figure, "One rank a node of submit/lab.sh, all on one machine. Hollow: more ranks than cores")
    return figure


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDS
    if not (folder / "lab.jsonl").exists():
        sys.exit(f"{folder} has no lab.jsonl: python -m tools.measuring.lab --folder {folder}")
    for name in TABLES:
        print(f"--- {name} ---\n{text(name, folder)}\n")


if __name__ == "__main__":
    main()
