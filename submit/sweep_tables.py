"""The tables of a sweep's records: median, range, efficiency, and what is remarkable."""

import pandas

STEPS = 35  # 5 of them warm up, 30 are timed
KEY = ("study", "chapter", "ranks", "batch", "flags", "site", "repeat")  # of a run
TITLES = {"batch": "batch: batch size, efficiency: compared with the best",
          "weak": "weak: weak scaling, the batch per rank",
          "strong": "strong: strong scaling, the global batch"}


def summary(records: pandas.DataFrame) -> pandas.DataFrame:
    """Return median, least and most images/s of repeated runs, with efficiency and remarks.

    Efficiency in weak and strong scaling: images/s / (ranks * images/s of a rank in the runs with
    the fewest ranks), for the same chapter, flags, site and processor. In the batch study: images/s
    / the best of them.
    """
    if "failed" in records:
        records = records[records["failed"].isna()]
    if records.empty:
        return pandas.DataFrame()
    series = ["study", "flags", "site", "processor", "chapter"]
    runs = records.groupby([*series, "ranks", "batch"], sort=False)
    rows = runs["images_per_second"].agg(median="median", least="min", most="max", repeats="size")
    rows = rows.join(runs[["device", "cpus", "nodes", "steps"]].first()).reset_index()
    rows = rows.groupby(series, sort=False, group_keys=False)[list(rows)].apply(add_efficiency)
    rows["remarks"] = [remarks(row) for row in rows.itertuples()]
    return rows.reset_index(drop=True)


def add_efficiency(rows):
    """Return the rows of one chapter in one study, sorted, with their efficiency."""
    rows = rows.sort_values(["ranks", "batch"])
    if rows["study"].iloc[0] == "batch":
        return rows.assign(efficiency=rows["median"] / rows["median"].max())
    per_rank = rows["median"] / rows["ranks"]
    return rows.assign(efficiency=per_rank / per_rank.groupby(rows["batch"]).transform("first"))


def remarks(row):
    """Return what is not as it should be in a row of the summary, as text."""
    texts = []
    if row.device == "cpu" and row.ranks > row.cpus * row.nodes:
        texts.append("more ranks than cores")
    if row.steps < STEPS:
        texts.append(f"{row.steps - 5} timed steps")
    spread = (row.most - row.least) / row.median
    if spread > 0.2:
        texts.append(f"spread {spread:.0%}")
    if row.efficiency > 1.05:
        texts.append("efficiency above 1.05")
    return "; ".join(texts)


def table(records: pandas.DataFrame) -> str:
    """Return the summary as text: a block for each study, set of flags and kind of machine."""
    rows_of_all = summary(records)
    if rows_of_all.empty:
        return ""
    blocks = []
    for (study, flags, site, processor), rows in rows_of_all.groupby(
            ["study", "flags", "site", "processor"], sort=False):
        title = TITLES[study]
        if study != "batch":
            title += f", efficiency: compared with {rows['ranks'].min()} rank(s)"
        first = rows.iloc[0]
        place = (f"{flags}; site {site}: {processor}, {first['cpus']} cores per node, "
                 f"{first['device']}")
        speed = "{:,.0f}".format if rows["least"].min() >= 100 else "{:,.1f}".format
        formats = dict.fromkeys(["images/s", "least", "most"], speed)
        columns = ["chapter", "ranks", "batch", "images/s", "least", "most", "repeats",
                   "efficiency", "remarks"]
        text = rows.rename(columns={"median": "images/s"})[columns].to_string(
            index=False, formatters=formats | {"efficiency": "{:.2f}".format})
        lines = [line.rstrip() for line in text.splitlines()]
        blocks.append("\n".join([title, place, *lines]))
    return "\n\n".join(blocks)
