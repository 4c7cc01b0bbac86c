"""Train every chapter on 1 and 2 ranks on handwritten digits; print what each costs as a table and draw it.

Then chapter 3 where a step computes for longer, on this machine and over a link of 1 Gbit/s (submit/lab.sh).
"""

import os
import shutil
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pandas
import torch
from launch import ROOT, launch, missing
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from one_line import Parser
from records import FIGURES, RECORDS, refusal
from runs import study
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tools.measuring import paying, zero
from tools.measuring.paying import answer, compared, label, milliseconds, rate
from tools.pages import style

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
    first = folder / f"{record['model']}-{framework(chapter)}-{precision}.npy"
    if not first.exists():
        np.save(first, found)
    return record | {"compared_in": precision, "difference": float(abs(found - np.load(first)).max())}


def framework(chapter: str) -> str:
    return "tensorflow" if "tensorflow" in chapter or "_tf" in chapter else "torch"


def table(records):
    """The records' columns that matter here, as text."""
    columns = {"chapter": "chapter", "ranks": "ranks", "images_per_second": "images/s", "test_accuracy": "accuracy",
               "difference": "difference", "compared_in": "in", "megabytes": "MB a rank"}
    formats = ["{}".format, "{}".format, "{:,.0f}".format, "{:.4f}".format, "{:.1e}".format, "{}".format,
               "{:.2f}".format]
    more = paying.table(records)
    records = records[records["dataset"] == "digits"]
    records = records.assign(chapter=records.apply(label, axis=1))
    return ("Handwritten digits, global batch 64; CPU, one thread a rank. Chapters 1 to 4: cnn, five epochs.\n"
            "Chapter 5: a perceptron of 0.5 million parameters, one epoch; MB a rank: its parameters, gradients,\n"
            "master copy and optimizer state on rank 0.\n"
            "difference: the largest of any parameter after one epoch, from the first row with the same network, in\n"
            "fp64; that shows whether two trainings are the same. DeepSpeed has no fp64: its rows show rounding.\n\n"
            + records.reindex(columns=list(columns)).rename(columns=columns).to_string(
                index=False, na_rep="", formatters=dict(zip(columns.values(), formats)))
            + (f"\n\n{more}" if more else ""))


def verdict(records: pandas.DataFrame) -> str:
    """Whether more ranks pay, in how many programs, and where: a line."""
    found = [each for each in compared(records) if not each["left_out"]]
    if not found:
        return "One run of each program: nothing to compare"
    digits = [each["ratio"] > 1 for each in found if each["digits"]]
    parts = [f"Digits: in {sum(digits)} of {len(digits)} programs"] * bool(digits)
    model = next((name for name, data in zip(records.get("model", ()), records["dataset"]) if data != "digits"), "")
    parts += [f"{'at ' + rate(each['link']) if each['link'] else model}: {answer(each['ratio'])}"
              for each in found if not each["digits"]]
    return f"Do {max(each['ranks'] for each in found)} ranks pay? " + "; ".join(parts)


def accuracies(records: pandas.DataFrame) -> str:
    """Whether the runs on digits of one network and framework have one test accuracy."""
    digits = records[records["dataset"] == "digits"]
    trainings = digits.groupby(["model", digits["chapter"].map(framework)])["test_accuracy"]
    apart = (trainings.max() - trainings.min()).max()
    return "the same accuracy" if apart < 5e-5 else f"accuracies within {apart:.4f}"  # of what is shown


def draw(records: pandas.DataFrame) -> Figure:
    """A row for each program on several ranks: how much of a step is computing, with the numbers beside it."""
    found = compared(records)
    first = records.iloc[0]
    foot = ("In colour: computing. Where it passes the white line, more ranks are faster than one, so many times. MB: "
            f"the gradients of a step. {first['processor']}, {first['cpus']} cores, one thread a rank; one run each")
    groups = {}
    for each in found:
        groups.setdefault(each["digits"], []).append(each)
    rows = 1 + sum(1 + len(group) for group in groups.values())
    figure, axis = style.picture(1.05 + 0.3 * rows + 0.22 * (len(foot) // 84 + 1))
    left, width = 2.65, 2.6  # of the bars, in inches as all that is drawn
    columns = {"times": (6.2, "{ratio:.2f}"), "computes": (7.2, "{computing}"), "waits": (8.05, "{waiting}"),
               "MB": (8.75, "{megabytes:.1f}")}
    for name, (x, _) in columns.items():
        axis.text(x, 0, name, ha="right", va="center", color=style.COMMUNICATION)
    axis.text(left, 0, "a step of each rank", va="center", color=style.COMMUNICATION)
    row = 0
    for digits, group in groups.items():
        row += 1
        one = records[(records["dataset"] == "digits") == digits].iloc[0]
        heading = f"{one['model']}, {one['batch_size']:.0f} synthetic images a rank"
        if digits:
            heading = f"Digits, {one['global_batch_size']:.0f} images a step in all: {accuracies(records)}"
        axis.text(0, row, heading, va="center", weight="bold")
        for each in group:
            row += 1
            place = f", {rate(each['link'])}" if each["link"] else "" if digits else ", this machine"
            axis.text(0, row, each["name"] + place, va="center")
            if each["left_out"]:
                axis.text(left, row, "left out", va="center")
                continue
            axis.barh(row, width * each["share"], 0.7, left, color=style.LIBRARIES[style.CHAPTERS[each["chapter"]]])
            axis.barh(row, width * (1 - each["share"]), 0.7, left + width * each["share"], color=style.COMMUNICATION)
            axis.plot([left + width * each["even"]] * 2, [row - 0.35, row + 0.35], color="white", lw=3,
                      solid_capstyle="butt")
            words = each | {name: milliseconds(each[name]) for name in ("computing", "waiting")}
            for name, (x, form) in columns.items():
                axis.text(x, row, form.format(**words), ha="right", va="center",
                          weight="bold" if name == "times" and each["ratio"] > 1 else "normal")
    axis.set(xlim=(0, 8.8), ylim=(rows - 0.5, -0.5))
    axis.set_axis_off()
    entries = {style.CHAPTERS[each["chapter"]]: Patch(color=style.LIBRARIES[style.CHAPTERS[each["chapter"]]])
               for each in found}
    entries["waits and sends"] = Patch(color=style.COMMUNICATION)
    style.head(figure, verdict(records), entries)
    style.foot(figure, foot)
    return figure


def main():
    parser = Parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results", help="for the records and the figure")
    results = parser.parse_args().folder
    if reason := refusal(results):
        sys.exit(f"demo: {reason}")
    try:
        results.mkdir(exist_ok=True)
    except OSError as problem:
        parser.error(f"no folder {results}: {problem.strerror}")
    first_rows = results / "demo.parameters"
    if not (results / "demo.jsonl.part").exists():  # nothing to go on with
        shutil.rmtree(first_rows, ignore_errors=True)
    first_rows.mkdir(exist_ok=True)
    skipped = {chapter: missing(chapter) for chapter, *_ in RUNS if missing(chapter)}
    plan = [{"chapter": chapter, "ranks": ranks, "flags": " ".join(map(str, flags))}
            for chapter, ranks, *flags in RUNS if chapter not in skipped]
    plan += [{"chapter": chapter, "ranks": ranks, "link": link} for chapter, ranks, link in paying.RUNS]
    records = study(results / "demo.jsonl", plan, lambda **run: paying.scale(**run) if "link" in run else
                    train(**run, folder=first_rows))
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
