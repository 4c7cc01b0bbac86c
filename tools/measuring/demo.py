"""Train every chapter on 1 and 2 ranks on handwritten digits; print what each costs as a table and draw it."""

import argparse
import os
import shutil
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import torch
from launch import ROOT, launch, missing
from matplotlib.figure import Figure
from records import FIGURES, RECORDS, refusal
from runs import study
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tools.measuring import zero

RUNS = [("01_single_node", 1), ("01_single_node/main_tf.py", 1), ("02_horovod/pytorch", 1), ("02_horovod/pytorch", 2),
        ("02_horovod/tensorflow", 1), ("02_horovod/tensorflow", 2), ("03_ddp", 1), ("03_ddp", 2),
        ("04_deepspeed", 1), ("04_deepspeed", 2), ("05_zero", 1, "--stage", 0),
        *(("05_zero", 2, "--stage", stage) for stage in range(4)),
        ("05_zero/fsdp.py", 1), ("05_zero/fsdp.py", 2)]  # chapter, ranks, flags
PERCEPTRON = ("--epochs", 1, "--width", 256, "--layers", 8)
FLAGS = ("--dataset", "digits", "--global-batch-size", "64")  # the same training, whatever the number of ranks


def parameters(checkpoint: str | Path) -> np.ndarray:
    """All parameters of a checkpoint in one vector, in fp64."""
    if Path(checkpoint).is_dir():
        return parameters_of_folder(Path(checkpoint, Path(checkpoint, "latest").read_text()))
    if "training.npy" in zipfile.ZipFile(checkpoint).namelist():  # TensorFlow's chapters save with NumPy
        with np.load(checkpoint) as arrays:
            found = [arrays[name] for name in arrays if "/" in name and not name.startswith("sgd/")]
    else:
        found = torch.load(checkpoint, map_location="cpu")["model"].values()
    return np.concatenate([np.asarray(array, dtype=np.float64).ravel() for array in found])


def parameters_of_folder(folder):
    """The same for the checkpoint of several ranks that DeepSpeed or PyTorch saved in a folder."""
    if (folder / ".metadata").exists():
        with tempfile.TemporaryDirectory() as temporary:
            dcp_to_torch_save(folder, f"{temporary}/whole")
            found = torch.load(f"{temporary}/whole")["model"]
    elif list(folder.glob("zero_*")):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            found = get_fp32_state_dict_from_zero_checkpoint(folder.parent, folder.name)
    else:
        found = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    return torch.cat([tensor.detach().flatten() for tensor in found.values()]).double().numpy()


def train(chapter, ranks, flags, folder):
    """The record of a run in fp32, with how far its parameters are, after one epoch of fp64, from the first row's.

    That shows whether two trainings are the same. DeepSpeed has no fp64: there they are those of fp32. The folder keeps
    the first row's parameters of each network.
    """
    precision = "fp32" if chapter in ("04_deepspeed", "05_zero") else "fp64"
    flags = *FLAGS, *flags.split(), *(PERCEPTRON if chapter.startswith("05") else [])
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary, "checkpoint")
        record = launch(chapter, ranks, *flags, "--epochs", 1, "--precision", precision, "--checkpoint", checkpoint)
        found = parameters(checkpoint)
    if chapter != "05_zero":  # whose run of one epoch in fp32 is all there is
        record = launch(chapter, ranks, *flags)
    if "memory" in record:
        record["megabytes"] = zero.total(record["memory"][0]) / 1e6
    framework = "tensorflow" if "tensorflow" in chapter or "_tf" in chapter else "torch"
    first = folder / f"{record['model']}-{framework}-{precision}.npy"
    if not first.exists():
        np.save(first, found)
    return record | {"compared_in": precision, "difference": float(abs(found - np.load(first)).max())}


def label(record):
    """The chapter, and the stage where there is one."""
    stage = record.get("stage")
    return record["chapter"] if pandas.isna(stage) else f"{record['chapter']}, stage {stage:.0f}"


def table(records):
    """The records' columns that matter here, as text."""
    columns = {"chapter": "chapter", "ranks": "ranks", "images_per_second": "images/s", "test_accuracy": "accuracy",
               "difference": "difference", "compared_in": "in", "megabytes": "MB a rank"}
    formats = ["{}".format, "{}".format, "{:,.0f}".format, "{:.4f}".format, "{:.1e}".format, "{}".format,
               "{:.2f}".format]
    records = records.assign(chapter=records.apply(label, axis=1))
    return ("Handwritten digits, global batch 64; CPU, one thread a rank. Chapters 1 to 4: cnn, five epochs.\n"
            "Chapter 5: a perceptron of 0.5 million parameters, one epoch; MB a rank: its parameters, gradients,\n"
            "master copy and optimizer state on rank 0.\n"
            "difference: the largest of any parameter after one epoch, from the first row with the same network, in\n"
            "fp64; that shows whether two trainings are the same. DeepSpeed has no fp64: its rows show rounding.\n\n"
            + records.reindex(columns=list(columns)).rename(columns=columns).to_string(
                index=False, na_rep="", formatters=dict(zip(columns.values(), formats))))


def draw(records: pandas.DataFrame) -> Figure:
    """Throughput and test accuracy of each run, side by side."""
    labels = [f"{label(row)}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}" for _, row in records.iterrows()]
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
                    f"global batch {records['global_batch_size'].iloc[0]}, one thread a rank)\n"
                    "cnn, five epochs; chapter 5: a perceptron, one epoch", fontsize=10)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results", help="for the records and the figure")
    results = parser.parse_args().folder
    if reason := refusal(results):
        sys.exit(f"demo: {reason}")
    results.mkdir(exist_ok=True)
    first_rows = results / "demo.parameters"
    if not (results / "demo.jsonl.part").exists():  # nothing to go on with
        shutil.rmtree(first_rows, ignore_errors=True)
    first_rows.mkdir(exist_ok=True)
    skipped = {chapter: missing(chapter) for chapter, *_ in RUNS if missing(chapter)}
    plan = [{"chapter": chapter, "ranks": ranks, "flags": " ".join(map(str, flags))}
            for chapter, ranks, *flags in RUNS if chapter not in skipped]
    records = study(results / "demo.jsonl", plan, partial(train, folder=first_rows))
    shutil.rmtree(first_rows)
    records = pandas.DataFrame(records)
    figure = (FIGURES if results.resolve() == RECORDS else results) / "demo.png"
    draw(records).savefig(figure, dpi=150)
    print("\n" + table(records))
    for chapter, reason in skipped.items():
        print(f"skipped: {chapter}: {reason}")
    print(f"\nrecords: {os.path.relpath(results / 'demo.jsonl')}   figure: {os.path.relpath(figure)}")


if __name__ == "__main__":
    main()
