"""Train every chapter's network on 1 and on 2 ranks; print and draw the speed-ups.

Chapter 2 comes last: if Horovod is not built yet, it is built after the other rows are shown. The
first pass gives all numbers; the others give their ranges.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from cluster.launch import ROOT, install_problem
from cluster.records import FIGURES, RECORDS
from cluster.study import BUSY, run_chapter, run_study
from tools import style
from tools.measuring.parameters import parameters
from workshop.flags import Parser

CPU = "--device cpu"  # two ranks cannot share a GPU, and CPU and GPU speeds are not comparable
# Five steps warm up. A step has to compute for much longer than its exchange takes.
DIGITS = f"{CPU} --dataset digits --global-batch-size 64"
TIMED_DIGITS = f"{DIGITS} --image-size 24 --epochs 2 --max-steps 30"
GPT = f"{CPU} --layers 1 --width 48 --epochs 1"
TIMED_GPT = f"{GPT} --global-batch-size 384 --max-steps 16"
# Short trainings, only to compare parameters. A checkpoint is saved after a whole epoch.
EXACT_DIGITS = f"{DIGITS} --epochs 1 --precision fp64"
EXACT_GPT = f"{GPT} --text LICENSE --global-batch-size 4 --precision fp64"
PROGRAMS = [  # name, program, numbers of ranks, flags, flags of the training in fp64
    ("1 PyTorch, plain loop", "01_single_node", [1], TIMED_DIGITS, None),
    ("3 DDP", "03_ddp", [1, 2], TIMED_DIGITS, EXACT_DIGITS),
    ("4 DeepSpeed", "04_deepspeed", [1, 2], TIMED_DIGITS, None),  # DeepSpeed has no fp64
    ("5 FSDP, on a GPT", "05_zero/fsdp.py", [1, 2], TIMED_GPT, EXACT_GPT),
    ("2 Horovod, PyTorch", "02_horovod", [1, 2], TIMED_DIGITS, EXACT_DIGITS),
    ("2 Horovod, TensorFlow", "02_horovod/main_tf.py", [1, 2], TIMED_DIGITS, EXACT_DIGITS),
]
EQUAL = 1e-8  # largest difference of "same" parameters, which are fp64 and near 1
HEAD = """\
Each program trains on one rank, then on two, which share each batch and average their
gradients. A rank is one process, here with one thread on one core. All speeds are in fp32.
Chapter 2 is last, because Horovod may have to be built first.

  samples/s  images (in chapter 5 sequences) per second
  speed-up   samples/s on two ranks divided by the same program's on one
             (of both the median and the range of all passes)
  accuracy   share of 360 new digits that are read correctly; in chapter 5 bits per byte of
             new text: 8 without training, lower is better
  same       same parameters as one rank, in a short training of its own in fp64?
"""
COLUMNS = (f"{'chapter, trained with':<21} ranks samples/s {'range':<9} speed-up {'range':<9} "
           "accuracy same")


def plan(passes, end_pass):
    """Yield the arguments of measure() for each run; build Horovod before its first run."""
    for repeat in range(passes):
        for name, program, numbers_of_ranks, flags, exact_flags in PROGRAMS:
            if not repeat and "not built yet" in (install_problem(program) or ""):
                show("\nBuilding Horovod for chapter 2 (several minutes, only once). "
                     "Ctrl-C ends the demo; the same command goes on.\n")
                setup = ROOT / "tools/environment/setup.py"
                subprocess.run([sys.executable, str(setup), "--venv", sys.prefix])
                show(f"\n{COLUMNS}")
            if problem := install_problem(program):
                if not repeat:
                    show(f"{name} is left out: {problem}")
                continue
            run = {"chapter": program, "name": name, "repeat": repeat}
            if exact_flags and not repeat:
                yield run | {"ranks": 2, "flags": exact_flags}
            for ranks in numbers_of_ranks:
                yield run | {"ranks": ranks, "flags": flags}
        end_pass(repeat)


def measure(chapter: str, name: str, repeat: int, ranks: int, flags: str) -> dict:
    """Return the record of a run; of one in fp64 with the difference from one rank."""
    if "fp64" not in flags:
        with heartbeat(f"pass {repeat + 1}: {name}, ranks: {ranks}"):
            return run_chapter(chapter, ranks, *flags.split())
    with (heartbeat(f"{name}, comparing parameters in fp64"),
          tempfile.TemporaryDirectory() as folder):
        one, two = Path(folder, "one"), Path(folder, "two")
        run_chapter(chapter, 1, *flags.split(), "--checkpoint", one)
        record = run_chapter(chapter, ranks, *flags.split(), "--checkpoint", two)
        difference = read_parameters(chapter, two) - read_parameters(chapter, one)
    return record | {"difference": float(abs(difference).max())}


def read_parameters(chapter, checkpoint):
    if not chapter.endswith("main_tf.py"):
        return parameters(checkpoint)
    with np.load(checkpoint) as arrays:
        return np.concatenate([arrays[name].ravel() for name in arrays])


@contextmanager
def heartbeat(label: str):
    """Print the label and the elapsed time every seven seconds."""
    ended, start = threading.Event(), time.monotonic()

    def print_label():
        while not ended.wait(7):
            show(f"  ({label}: {time.monotonic() - start:.0f} s)")

    threading.Thread(target=print_label, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def show(text: str) -> None:
    """Print a line above the progress bar, without buffering."""
    with tqdm.external_write_mode():
        print(text, flush=True)


def summary(records: list[dict]) -> dict[tuple, dict]:
    """Return {(program's name, ranks): record}, by chapter, with what all passes measured.

    Added are `speeds` and `speed_ups` (on one rank none), with an entry per pass, and `difference`.
    """
    differences = {record["name"]: record["difference"]
                   for record in records if "difference" in record}
    rows = {}
    for record in records:
        if "difference" not in record:
            row = rows.setdefault((record["name"], record["ranks"]), record | {"speeds": []})
            row["speeds"].append(record["images_per_second"])
    for (name, ranks), row in rows.items():
        pairs = zip(rows[name, 1]["speeds"], row["speeds"], strict=False)
        row["speed_ups"] = [two / one for one, two in pairs] if ranks > 1 else []
        row["difference"] = differences.get(name) if ranks > 1 else None
    return dict(sorted(rows.items()))


def line(row: dict) -> str:
    """Return a line of the table."""
    is_gpt = row["model"] == "GPT"
    accuracy = f"{row['test_loss']:.1f} bits" if is_gpt else f"{row['test_accuracy']:.1%}"
    same = "n/a" if row["ranks"] > 1 else ""
    if row["difference"] is not None:
        same = "yes" if row["difference"] < EQUAL else "NO"
    speed, speeds = median_and_range(row["speeds"], ".0f")
    speed_up, speed_ups = median_and_range(row["speed_ups"], ".2f")
    return (f"{row['name']:<21} {row['ranks']:>5} {speed:>9} {speeds:<9} {speed_up:>8} "
            f"{speed_ups:<9} {accuracy:>8} {same:>4}").rstrip()


def median_and_range(values, form):
    if not values:
        return "", ""
    ends = f"{min(values):{form}}-{max(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.median(values):{form}}", ends


def warning(records: list[dict]) -> str:
    """Return which speeds may mislead, or an empty text."""
    if records[0]["cpus"] < 2:
        return "The two ranks shared one core: do not trust the speed-ups."
    names = sorted({record["name"] for record in records if (record["others"] or 0) > BUSY})
    if not names:
        return ""
    return (f"Do not trust the speeds of {'; '.join(names)}:\nmeanwhile other programs used "
            f"up to {max(record['others'] or 0 for record in records):.0%} of the cores.")


def table(records: list[dict]) -> str:
    """Return the table of the demo's page."""
    lines = map(line, summary(records).values())
    return "\n".join([COLUMNS, *lines, "", warning(records)]).strip()


def draw(records: list[dict]) -> Figure:
    """Draw the speed-ups on two ranks."""
    rows = [row for row in summary(records).values() if row["speed_ups"]]
    figure, axis = style.make_figure(
        2.6 + 0.42 * len(rows), title="Two ranks compared with one, on the same batch")
    limit = 0.4 + max([2, *(max(row["speed_ups"]) for row in rows)])
    for y, row in enumerate(rows):
        median, low, high = (of(row["speed_ups"]) for of in (statistics.median, min, max))
        axis.barh(y, median, 0.7, xerr=[[median - low], [high - median]], capsize=4,
                  color=style.LIBRARIES[style.CHAPTERS[row["chapter"]]])
        axis.text(limit, y, f"{median:.2f}", ha="right", va="center")
    axis.axvline(1, color=style.IDEAL)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.tick_params(axis="y", length=0)
    axis.set(xlabel="times as fast as one rank", xlim=(0, limit), ylim=(len(rows) - 0.5, -0.5))
    passes = 1 + records[-1]["repeat"]
    style.add_footer(
        figure, f"{records[0]['processor']}, cores: {records[0]['cpus']}, one thread per rank; "
        f"{f'passes: {passes}, median and range' if passes > 1 else 'one pass'}. "
        f"{warning(records)}")
    return figure


def main():
    parser = Parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results",
                        help="folder for records and figure (default: results)")
    parser.add_argument("--passes", type=int, default=3, help="of all programs (default: 3)")
    args = parser.parse_args()
    folder = args.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        parser.error(f"{problem}: python -m tools.measuring.demo FOLDER writes to another folder")
    figure = (FIGURES if folder.resolve() == RECORDS else folder) / "demo.png"
    measured = []

    def end_pass(repeat):
        draw(measured).savefig(figure, dpi=style.DPI)
        show(f"\n{warning(measured)}\nPass {repeat + 1} of {args.passes} has ended; "
             f"{os.path.relpath(figure)} draws it.")
        if repeat + 1 < args.passes:
            show("More passes, each about as long, give the ranges. Ctrl-C leaves them out.\n\n"
                 f"{COLUMNS}")

    def show_row(record):
        measured.append(record)
        if "difference" not in record:
            show(line(summary(measured)[record["name"], record["ranks"]]))

    show(f"{HEAD}\n{COLUMNS}")
    run_study(folder / "demo.jsonl", plan(args.passes, end_pass), measure, show_row)
    show(f"records: {os.path.relpath(folder / 'demo.jsonl')}; docs/DEMO.md explains the numbers")


if __name__ == "__main__":
    main()
