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
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from records import FIGURES, RECORDS, refusal
from runs import study
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tools.measuring import zero
from tools.pages import style

RUNS = [("01_single_node", 1), ("01_single_node/main_tf.py", 1), ("02_horovod/pytorch", 1), ("02_horovod/pytorch", 2),
        ("02_horovod/tensorflow", 1), ("02_horovod/tensorflow", 2), ("03_ddp", 1), ("03_ddp", 2),
        ("04_deepspeed", 1), ("04_deepspeed", 2), ("05_zero", 1, "--stage", 0),
        *(("05_zero", 2, "--stage", stage) for stage in range(4)),
        ("05_zero/fsdp.py", 1), ("05_zero/fsdp.py", 2)]  # chapter, ranks, flags
PERCEPTRON = ("--epochs", 1, "--width", 256, "--layers", 8)
FLAGS = ("--dataset", "digits", "--global-batch-size", "64")  # the same training, whatever the number of ranks
NETWORKS = {"cnn": "cnn, five epochs", "perceptron": "perceptron, one epoch"}


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
    first = folder / f"{record['model']}-{framework(chapter)}-{precision}.npy"
    if not first.exists():
        np.save(first, found)
    return record | {"compared_in": precision, "difference": float(abs(found - np.load(first)).max())}


def framework(chapter: str) -> str:
    return "tensorflow" if "tensorflow" in chapter or "_tf" in chapter else "torch"


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


def pale(color: str, share: float) -> tuple:
    """The colour on white, of which this share is left."""
    return tuple(1 - share * (1 - part) for part in to_rgb(color))


def verdict(records: pandas.DataFrame) -> str:
    """Whether more ranks reached the accuracy of fewer, and in how many programs they were faster, as a line."""
    programs = [rows.sort_values("ranks") for _, rows in records.groupby(records.apply(label, axis=1))
                if rows["ranks"].nunique() > 1]
    if not programs:
        return "Images a second, and the test accuracy"
    trainings = records.groupby(["model", records["chapter"].map(framework)])["test_accuracy"]
    apart = (trainings.max() - trainings.min()).max()
    accuracy = "the same accuracy" if apart < 5e-5 else f"accuracies within {apart:.4f}"  # of what is shown
    speeds = [rows["images_per_second"] for rows in programs]
    faster = sum(each.iloc[-1] > each.iloc[0] for each in speeds)
    return f"More ranks: {accuracy}, faster in {faster} of {len(programs)} programs"


def draw(records: pandas.DataFrame) -> Figure:
    """Throughput by program and ranks, a panel for each network; the names of the programs with the test accuracies."""
    ranks = sorted(set(records["ranks"].tolist()))
    shares = dict(zip(ranks, np.linspace(1, 0.4, len(ranks))[::-1]))
    colors = {chapter: style.LIBRARIES[style.CHAPTERS[chapter]] for chapter in records["chapter"]}
    panels = [(network, list(rows.groupby(rows.apply(label, axis=1), sort=False)))
              for network, rows in records.groupby("model", sort=False)]
    most = max(len(programs) for _, programs in panels)
    figure, axes = style.picture(2.38 + 0.53 * most, 1, len(panels), squeeze=False)
    height = 0.52 / len(ranks)  # of a bar; what is left of its row is for words
    for axis, (network, programs) in zip(axes[0], panels):
        for row, (name, runs) in enumerate(programs):
            found = runs["test_accuracy"]
            accuracies = " to ".join(dict.fromkeys(f"{value:.4f}" for value in (found.min(), found.max())))
            axis.text(0, row - 0.02, name, va="bottom")
            axis.text(1, row - 0.02, accuracies, va="bottom", ha="right", transform=axis.get_yaxis_transform())
            for number, run in enumerate(runs.itertuples()):
                axis.barh(row + number * height, run.images_per_second, 0.95 * height, align="edge",
                          color=pale(colors[run.chapter], shares[run.ranks]))
        axis.set(title=NETWORKS[network], ylim=(most - 0.3, -0.5), yticks=(), xlabel="images/s")
        axis.set_title("accuracy", loc="right", fontsize=style.TEXT)
        axis.spines["left"].set_visible(False)
        axis.xaxis.set_major_locator(MaxNLocator(3))
        axis.xaxis.set_major_formatter("{x:,.0f}")
    entries = {f"{number} rank{'s' * (number > 1)}": Patch(color=pale("#000000", shares[number])) for number in ranks}
    entries |= {style.CHAPTERS[chapter]: Patch(color=color) for chapter, color in colors.items()
                if style.CHAPTERS[chapter] != "one process"}  # whose rows say it
    style.head(figure, verdict(records), entries, ncols=min(len(entries), 7), handlelength=0.8, columnspacing=1)
    figure.get_layout_engine().set(w_pad=0.1)  # inches
    first = records.iloc[0]
    style.foot(figure, f"Handwritten digits, global batch {first['global_batch_size']}; {first['processor']}, "
               f"{first['cpus']} cores, one thread a rank; one run each")
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
    draw(records).savefig(figure, dpi=style.DPI)
    print("\n" + table(records))
    for chapter, reason in skipped.items():
        print(f"skipped: {chapter}: {reason}")
    print(f"\nrecords: {os.path.relpath(results / 'demo.jsonl')}   figure: {os.path.relpath(figure)}")


if __name__ == "__main__":
    main()
