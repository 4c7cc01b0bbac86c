"""Train every chapter's network on 1 and on 2 ranks; print a row of speed and accuracy for each.

Chapter 2 comes last: if Horovod is not built yet, it is built after the other rows are shown.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import psutil
from matplotlib.figure import Figure
from tqdm import tqdm

from cluster.launch import ROOT, install_problem
from cluster.parameters import parameters
from cluster.records import FIGURES, RECORDS, read_records
from cluster.study import run_chapter, run_study
from tools import style
from workshop.flags import Parser

CPU = "--device cpu"  # two ranks cannot share a GPU, and CPU and GPU speeds are not comparable
DIGITS = f"{CPU} --dataset digits --global-batch-size 64"
EXACT = f"{DIGITS} --precision fp64"
GPT = f"{CPU} --global-batch-size 128 --layers 1 --width 48 --epochs 1"
LARGE = (f"{CPU} --dataset synthetic --image-size 48 --model resnet18 --global-batch-size 64 "
         "--lr 0.01 --epochs 1 --max-steps 8")  # five of them warm up
RUNS = [  # chapter, name, ranks, flags, name of its baseline on one rank
    ("01_single_node", "1  PyTorch", 1, EXACT, None),
    ("03_ddp", "3  PyTorch's DDP", 2, EXACT, "1  PyTorch"),
    ("01_single_node", "1  a larger network", 1, LARGE, None),
    ("03_ddp", "3  a larger network, DDP", 2, LARGE, "1  a larger network"),
    ("04_deepspeed", "4  DeepSpeed", 1, DIGITS, None),
    ("04_deepspeed", "4  DeepSpeed", 2, DIGITS, "4  DeepSpeed"),
    ("05_zero", "5  DeepSpeed's ZeRO", 1, GPT, None),
    ("05_zero", "5  DeepSpeed's ZeRO", 2, GPT, "5  DeepSpeed's ZeRO"),
    ("05_zero/fsdp.py", "5  PyTorch's FSDP", 1, f"{GPT} --precision fp64", None),
    ("05_zero/fsdp.py", "5  PyTorch's FSDP", 2, f"{GPT} --precision fp64", "5  PyTorch's FSDP"),
    ("02_horovod", "2  Horovod, PyTorch", 2, EXACT, "1  PyTorch"),
]
BUSY = 0.1  # share of the cores: the demo warns if other programs use more
EQUAL = 1e-8  # largest difference of "same" parameters, which are fp64 and near 1
HEAD = """\
Each row trains a network to read handwritten digits, with 64 images in every step.
A rank is one process that trains. Two ranks take 32 of the 64 images each, and then
average their gradients, so that both have the same network again. The larger network
trains on random images, only to measure speed. Chapter 5 trains a small GPT to write
text: its samples are sequences of 64 bytes. All run on the CPU.

  samples/s training images, or sequences, per second
  speed-up  samples/s divided by those of the same training on one rank
  accuracy  the share of 360 new digits that it reads correctly; of the GPT, how many
            bits each byte of new text costs (without training: 8)
  same      same parameters as one rank? (blank: not comparable)
"""
COLUMNS = (f"{'chapter, trained with':<25} {'ranks':>5} {'samples/s':>9} {'speed-up':>9} "
           f"{'accuracy':>9} {'same':>5}")


def train(folder: Path, chapter: str, name: str, ranks: int, flags: str,
          against: str | None) -> dict:
    """Return the record of a run, with `speed_up`, `difference` and `others` added.

    against: the name of the baseline. speed_up: images/s divided by the baseline's, or None.
    difference: the largest difference of a parameter from the baseline's; None without a baseline,
    or if the precision is too low to compare.
    others: the share of the machine's cores that other programs use, from 0 to 1.
    """
    baseline_file = folder / "demo.parameters" / f"{against or name}.npy"
    difference = speed_up = None
    others = psutil.cpu_percent(0.3) / 100
    with tempfile.TemporaryDirectory() as temporary, heartbeat(f"{name}, {ranks} rank(s)"):
        checkpoint = Path(temporary, "checkpoint")
        checkpoint_flags = ["--checkpoint", checkpoint] if "fp64" in flags else []
        record = run_chapter(chapter, ranks, *flags.split(), *checkpoint_flags)
        if checkpoint_flags and against is None:
            np.save(baseline_file, parameters(checkpoint))
        elif checkpoint_flags and baseline_file.exists():
            differences = parameters(checkpoint) - np.load(baseline_file)
            difference = float(abs(differences).max())
    for baseline_row in read_records(folder / "demo.jsonl.part"):
        if (baseline_row["name"], baseline_row["ranks"]) == (against, 1):
            speed_up = record["images_per_second"] / baseline_row["images_per_second"]
    return record | {"speed_up": speed_up, "difference": difference, "others": others}


@contextmanager
def heartbeat(label: str):
    """Print the elapsed time every ten seconds."""
    finished = threading.Event()

    def print_elapsed():
        seconds = 0
        while not finished.wait(10):
            seconds += 10
            show(f"  ({label}: {seconds} s)")

    threading.Thread(target=print_elapsed, daemon=True).start()
    try:
        yield
    finally:
        finished.set()


def show(text: str) -> None:
    """Print a line above the progress bar, without buffering."""
    with tqdm.external_write_mode():
        print(text, flush=True)


def row(record: dict) -> str:
    """Return a line of the table."""
    speed_up, accuracy, same = "", "", ""
    if record["speed_up"] is not None:
        speed_up = f"{record['speed_up']:.2f}"
    if record["model"] == "GPT":
        accuracy = f"{record['test_loss']:.2f} bits"
    elif record["dataset"] == "digits":
        accuracy = f"{record['test_accuracy']:.1%}"
    if record["difference"] is not None:
        same = "yes" if record["difference"] < EQUAL else "NO"
    return (f"{record['name']:<25} {record['ranks']:>5} {record['images_per_second']:>9,.0f} "
            f"{speed_up:>9} {accuracy:>9} {same:>5}").rstrip()


def verdict(records: list[dict]) -> str:
    """Return a sentence on the speed-ups, with a warning if the machine was busy."""
    speed_ups = [record["speed_up"] for record in records if record["speed_up"] is not None]
    faster = sum(speed_up > 1 for speed_up in speed_ups)
    text = (f"Two ranks were faster than one in {faster} of {len(speed_ups)} programs: speed-up "
            f"{min(speed_ups):.2f} to {max(speed_ups):.2f}.")
    others = statistics.median(record["others"] for record in records)
    if others > BUSY:
        text += (f" Other programs used {others:.0%} of the cores: run it again on an idle machine "
                 "before you trust a speed-up.")
    return text


def table(records: list[dict]) -> str:
    """Return all that the demo prints, for the README."""
    return "\n".join([HEAD, COLUMNS, *map(row, records), "", verdict(records)])


def draw(records: list[dict]) -> Figure:
    """Draw this machine's speed-ups on two ranks, and published ones on many GPUs."""
    pairs = [record for record in records if record["speed_up"] is not None]
    pairs.sort(key=lambda record: record["name"])  # by chapter
    figure, (bars, curve) = style.make_figure(
        max(4.4, 2 + 0.42 * len(pairs)), 1, 2, width_ratios=(1.25, 1),
        title="How much faster are more ranks?")
    for y, record in enumerate(pairs):
        large = record["model"] != "cnn"
        bars.barh(y, record["speed_up"], 0.7,
                  color=style.LIBRARIES["DDP"] if large else style.ABSENT)
        bars.text(0.05, y, f"{record['speed_up']:.2f}", va="center",
                  color="white" if large else "black")
    bars.axvline(1, color=style.IDEAL)
    bars.set_yticks(range(len(pairs)), [record["name"] for record in pairs])
    bars.tick_params(axis="y", length=0)
    bars.set(title="two ranks here",
             xlabel="times as fast as one rank\n(grey: a tiny network, on digits)",
             xlim=(0, max([2, *(record["speed_up"] for record in pairs)])),
             ylim=(len(pairs) - 0.5, -0.5))

    published = pandas.read_csv(RECORDS / "published.csv").query("group in ('A', 'B')")
    gpus = published.nodes * published.gpus
    base = published.base_images_per_second / published.base_gpus
    curve.plot([1, gpus.max()], [1, gpus.max()], color=style.IDEAL, linewidth=1)
    curve.plot(gpus, published.images_per_second / base, "o", color=style.LIBRARIES["DDP"])
    curve.set(title="GPUs, published", xlabel="GPUs\n(large networks)",
                  ylabel="times as fast as one GPU", xscale="log", yscale="log",
                  xlim=(4, 1200), ylim=(4, 1200))
    for axis in curve.xaxis, curve.yaxis:
        axis.set_major_formatter("{x:.0f}")
    style.add_footer(
        figure, f"Left: {records[0]['processor']}, {records[0]['cpus']} cores, one "
        "thread per rank, one run. Right: ResNet, Inception, VGG; sources in "
        "assets/records/published.csv; the line is perfect scaling.")
    return figure


def plan():
    """Yield the arguments of train() for each run; build Horovod before its first run."""
    for chapter, name, ranks, flags, against in RUNS:
        if "not built yet" in (install_problem(chapter) or ""):
            show("\nBuilding Horovod for chapter 2 (several minutes, only once). "
                 "Ctrl-C keeps the rows already measured.\n")
            setup = ROOT / "tools/environment/setup.py"
            subprocess.run([sys.executable, str(setup), "--venv", sys.prefix])
            show(f"\n{COLUMNS}")
        if install_problem(chapter):
            show(f"{name} is left out: {install_problem(chapter)}")
        else:
            yield {"chapter": chapter, "name": name, "ranks": ranks, "flags": flags,
                   "against": against}


def main():
    parser = Parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results",
                        help="folder for records and figure (default: results)")
    folder = parser.parse_args().folder
    try:
        (folder / "demo.parameters").mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        parser.error(f"cannot write into {folder}: {problem.strerror}")
    show(f"{HEAD}\n{COLUMNS}")
    records = run_study(folder / "demo.jsonl", plan(), partial(train, folder),
                        lambda record: show(row(record)))
    shutil.rmtree(folder / "demo.parameters")
    figure = (FIGURES if folder.resolve() == RECORDS else folder) / "demo.png"
    draw(records).savefig(figure, dpi=style.DPI)
    show(f"\n{verdict(records)}\nA second rank pays off when a step computes for longer than "
         f"its communication takes.\n\nrecords: {os.path.relpath(folder / 'demo.jsonl')}   "
         f"picture: {os.path.relpath(figure)}")


if __name__ == "__main__":
    main()
