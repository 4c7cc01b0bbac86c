"""The page and the two figures of gpu.py's records."""

import json
from pathlib import Path

import matplotlib
import pandas

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MACHINE = {"part", "launcher", "host", "processor", "cpus", "python", "torch", "git", "time", "gpus", "device",
           "tensorflow", "tensorflow-cpu", "horovod", "deepspeed"}


def write_page(folder: Path) -> None:
    """Write README.md, ladder.png and scaling.png from records.jsonl in the folder."""
    records = pandas.DataFrame(map(json.loads, (folder / "records.jsonl").read_text().splitlines()))
    here = records.iloc[-1]
    parts = [f"# {here['gpus']} x {here['processor']}",
             f"torch {here['torch']}, Python {here['python']}, commit {here['git']}, {here['time']}"]
    for part, rows in records.groupby("part", sort=False):
        parts += [f"## {part}"]
        checks = rows[rows["check"].notna()] if "check" in rows else rows[:0]
        if len(checks):
            parts += ["\n".join(f"- {'yes' if row.right else 'NO'}: {row.check}" for row in checks.itertuples())]
            parts += [f"```\n{row.printed}\n```" for row in checks.itertuples() if row.printed]
        numbers = rows.drop(index=checks.index).dropna(axis=1, how="all")
        numbers = numbers.drop(columns=[name for name in numbers if name in here.index and name in MACHINE])
        if len(numbers):
            parts += [f"```\n{numbers.to_string(index=False, na_rep='', float_format='{:,.4g}'.format)}\n```"]
    if "rung" in records and draw_ladder(records, folder / "ladder.png"):
        parts += ["![Images a second of one GPU, by what is switched on.](ladder.png)"]
    if "ranks" in records and draw_scaling(records, folder / "scaling.png"):
        parts += ["![Images a second by the number of GPUs.](scaling.png)"]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n")


def draw_ladder(records, path):
    rows = records[(records["part"] == "ladder") & records["images/s"].notna() & records["rung"].notna()]
    if rows.empty:
        return False
    names = [f"{row.rung}\nbatch {row.batch:.0f}" for row in rows.itertuples()]
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(rows) + 1), layout="constrained")
    axes.barh(names, rows["images/s"])
    axes.invert_yaxis()
    axes.bar_label(axes.containers[0], fmt="{:,.0f}", padding=3)
    axes.margins(x=0.1)
    axes.set(title=f"A bare ResNet loop on one {rows['processor'].iloc[0].split(',')[0]}", xlabel="images/s")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def draw_scaling(records, path):
    rows = records[(records["part"] == "scaling") & (records["main.py"] == "03_ddp")].sort_values("ranks")
    if rows.empty:
        return False
    speed, ranks = rows["images/s"].to_numpy(), rows["ranks"].to_numpy()
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(ranks, speed[0] * ranks / ranks[0], "--", color="gray", label="ideal")
    axes.plot(ranks, speed, "o-", label="03_ddp")
    axes.set(title="Weak scaling", xlabel="GPUs", ylabel="images/s", xticks=ranks, ylim=0)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
