"""Train every chapter on 1 and 2 ranks on handwritten digits; print what each costs as a table and draw it."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pandas
import torch
from launch import ROOT, launch, missing
from matplotlib.figure import Figure
from tqdm import tqdm

RUNS = [("01_single_node", 1), ("01_single_node/main_tf.py", 1), ("02_horovod/pytorch", 1), ("02_horovod/pytorch", 2),
        ("02_horovod/tensorflow", 1), ("02_horovod/tensorflow", 2), ("03_ddp", 1), ("03_ddp", 2),
        ("04_deepspeed", 1), ("04_deepspeed", 2)]  # chapter, ranks
FLAGS = ("--dataset", "digits", "--global-batch-size", "64")  # the same training, whatever the number of ranks


def parameters(checkpoint):
    """All parameters of a checkpoint in one vector, in fp64."""
    if Path(checkpoint).is_dir():  # DeepSpeed's
        checkpoint = Path(checkpoint, Path(checkpoint, "latest").read_text(), "mp_rank_00_model_states.pt")
    if "training.npy" in zipfile.ZipFile(checkpoint).namelist():  # TensorFlow's chapters save with NumPy
        with np.load(checkpoint) as arrays:
            found = [arrays[name] for name in arrays if "/" in name and not name.startswith("sgd/")]
    else:
        found = torch.load(checkpoint, map_location="cpu", weights_only=False)  # DeepSpeed's holds its own objects too
        found = found["module" if "module" in found else "model"].values()
    return np.concatenate([np.asarray(array, dtype=np.float64).ravel() for array in found])


def train(chapter, ranks, folder):
    """The record of a run of five epochs, and the parameters after one: later, rounding grows and tells little."""
    checkpoint = Path(folder, f"{len(os.listdir(folder))}.checkpoint")
    launch(chapter, ranks, *FLAGS, "--epochs", 1, "--checkpoint", checkpoint)
    return launch(chapter, ranks, *FLAGS), parameters(checkpoint)


def table(records):
    """The records' columns that matter here, as text."""
    columns = {"chapter": "chapter", "ranks": "ranks", "images_per_second": "images/s", "test_accuracy": "accuracy",
               "difference": "difference"}
    formats = ["{}".format, "{}".format, "{:,.0f}".format, "{:.4f}".format, "{:.1e}".format]
    return ("Handwritten digits, global batch 64, five epochs; CPU, one thread a rank.\n"
            "difference: the largest of any parameter after one epoch, in fp32, from the same framework's one rank\n"
            "of chapter 1 (main.py is PyTorch's, main_tf.py TensorFlow's).\n\n"
            + records[list(columns)].rename(columns=columns).to_string(
                index=False, formatters=dict(zip(columns.values(), formats))))


def draw(records, path):
    """Throughput and test accuracy of each run, side by side."""
    labels = [f"{row.chapter}, {row.ranks} rank{'s' * (row.ranks > 1)}" for row in records.itertuples()]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(records)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, column, title in zip(axes, ("images_per_second", "test_accuracy"),
                                   ("Throughput [images/s]", "Test accuracy")):
        bars = axis.barh(labels, records[column], color=[f"C{ranks - 1}" for ranks in records.ranks], height=0.7)
        axis.bar_label(bars, fmt="{:,.0f}" if column == "images_per_second" else "{:.3f}", padding=2)
        axis.set_title(title, loc="left", fontsize=11)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(f"Handwritten digits on the CPU of this machine ({records['cpus'].iloc[0]} cores, "
                    f"global batch {records['global_batch_size'].iloc[0]}, one thread a rank)", fontsize=10)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results", help="for the records and the figure")
    results = parser.parse_args().folder
    results.mkdir(exist_ok=True)
    skipped = {chapter: missing(chapter) for chapter, _ in RUNS if missing(chapter)}
    runs, records, references = [run for run in RUNS if run[0] not in skipped], [], {}
    with tempfile.TemporaryDirectory() as folder, tqdm(runs, unit="run", disable=None) as bar:
        for chapter, ranks in bar:
            bar.set_description(f"{chapter} on {ranks}")
            try:
                record, vector = train(chapter, ranks, folder)
            except subprocess.CalledProcessError as problem:
                bar.close()
                sys.exit(f"demo: {chapter} failed on {ranks} rank(s):\n{problem.stdout}")
            reference = references.setdefault("tensorflow" in record["chapter"] or "_tf" in record["chapter"], vector)
            records.append(record | {"difference": abs(vector - reference).max()})  # from the framework's first run
    with open(results / "demo.jsonl", "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    records = pandas.DataFrame(records)
    draw(records, results / "demo.png")
    print("\n" + table(records))
    for chapter, reason in skipped.items():
        print(f"skipped: {chapter}: {reason}")
    print(f"\nrecords: {os.path.relpath(results / 'demo.jsonl')}   figure: {os.path.relpath(results / 'demo.png')}")


if __name__ == "__main__":
    main()
