"""Train every chapter's network on 1 and on 2 ranks, three times; print and draw the speed-ups.

Chapter 2 comes last: if Horovod is not built yet, it is built after the other rows are shown. The
first of three passes gives all numbers; the others give their ranges.
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
import pandas
from matplotlib.figure import Figure
from tqdm import tqdm

from cluster.launch import ROOT, install_problem
from cluster.records import FIGURES, RECORDS
from cluster.study import BUSY, run_chapter, run_study
from tools import style
from tools.measuring.parameters import parameters
from workshop.flags import Parser

REPEATS, IMAGE_SIZE, BATCH, GPT_BATCH = 3, 24, 64, 384
CPU = "--device cpu"  # two ranks cannot share a GPU, and CPU and GPU speeds are not comparable
# Five steps warm up. A step has to compute for much longer than its exchange takes.
DIGITS = f"{CPU} --dataset digits --global-batch-size {BATCH}"
TIMED_DIGITS = f"{DIGITS} --image-size {IMAGE_SIZE} --epochs 2 --max-steps 30"
GPT = f"{CPU} --layers 1 --width 48 --epochs 1"
TIMED_GPT = f"{GPT} --global-batch-size {GPT_BATCH} --max-steps 16"
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
HEAD = f"""\
Each program trains on one rank, and then on two. A rank is one process that trains, here
with one thread, on one core. Each of two ranks takes half of a batch; then they average
their gradients, so that both have the same network again. All speeds are in fp32. Chapter 2
is trained last in each pass, because Horovod may have to be built first.

Chapters 1 to 4 train a small network on handwritten digits, with {BATCH} images in every step,
enlarged to {IMAGE_SIZE} x {IMAGE_SIZE} pixels. Chapter 5 trains a small GPT on text, with
{GPT_BATCH} sequences of 64 bytes in every step. Compare speeds and speed-ups of one network only.

  samples/s  training images, or sequences, per second: median and range of {REPEATS} passes
  speed-up   in each pass, samples/s on two ranks divided by the same program's on one:
             median and range
  accuracy   the share of 360 new digits that it reads correctly; of the GPT, how many bits
             each byte of new text costs (without training: 8; lower is better)
  same       same parameters as one rank, in a short training of its own in fp64?
"""
COLUMNS = (f"{'chapter, trained with':<21} ranks samples/s {'range':<9} speed-up {'range':<9} "
           "accuracy same")


def plan(end_first_pass):
    """Yield the arguments of measure() for each run; build Horovod before its first run."""
    for repeat in range(REPEATS):
        if repeat == 1:
            end_first_pass()
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


def measure(chapter: str, name: str, repeat: int, ranks: int, flags: str) -> dict:
    """Return the record of a run; of one in fp64 with the difference from one rank."""
    precision = "fp64" if "fp64" in flags else "fp32"
    task = f"on {ranks} rank(s)" if precision == "fp32" else "comparing parameters in fp64"
    with heartbeat(f"pass {repeat + 1} of {REPEATS}: {name}, {task}"):
        if precision == "fp32":
            return run_chapter(chapter, ranks, *flags.split())
        with tempfile.TemporaryDirectory() as folder:
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
    """Print the label and the elapsed time whenever nothing has been printed for ten seconds."""
    ended, start = threading.Event(), time.monotonic()

    def print_label():
        while not ended.wait(1):
            if time.monotonic() - show.last > 10:
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
    show.last = time.monotonic()


def summary(records: list[dict]) -> list[dict]:
    """Return a record per program and number of ranks, by chapter, with what all repeats measured.

    Added are `speeds` and `loads` (others), and, for two ranks, `speed_ups`, with an entry per
    repeat, and `difference`.
    """
    rows, differences = {}, {}
    for record in records:
        if "difference" in record:
            differences[record["name"]] = record["difference"]
        else:
            row = rows.setdefault((record["name"], record["ranks"]),
                                  record | {"speeds": [], "loads": []})
            row["speeds"].append(record["images_per_second"])
            row["loads"].append(record["others"] or 0)
    for (name, ranks), row in rows.items():
        pairs = zip(rows[name, 1]["speeds"], row["speeds"], strict=False)
        row["speed_ups"] = [two / one for one, two in pairs] if ranks > 1 else []
        row["busy"] = max(row["loads"] + rows[name, 1]["loads"]) > BUSY
        row["difference"] = differences.get(name) if ranks > 1 else None
    return [rows[key] for key in sorted(rows)]


def line(row: dict) -> str:
    """Return a line of the table."""
    accuracy, same = f"{row['test_accuracy']:.1%}" if "test_accuracy" in row else "", ""
    if row["model"] == "GPT":
        accuracy = f"{row['test_loss']:.1f} bits"
    if row["difference"] is not None:
        same = "yes" if row["difference"] < EQUAL else "NO"
    elif row["ranks"] > 1:
        same = "n/a"
    speed, speeds = median_and_range(row["speeds"], ".0f")
    speed_up, speed_ups = median_and_range(row["speed_ups"], ".2f")
    star = " *" if row["busy"] else ""
    return (f"{row['name']:<21} {row['ranks']:>5} {speed:>9} {speeds:<9} {speed_up:>8} "
            f"{speed_ups:<9} {accuracy:>8} {same:>4}").rstrip() + star


def median_and_range(values, form):
    if not values:
        return "", ""
    ends = f"{min(values):{form}}-{max(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.median(values):{form}}", ends


def verdict(records: list[dict]) -> str:
    """Return a sentence on the speed-ups."""
    rows = [row for row in summary(records) if row["speed_ups"]]
    quiet = [row for row in rows if not row["busy"]]
    which = "medians of rows without *" if 0 < len(quiet) < len(rows) else "medians"
    series = [row["speed_ups"] for row in quiet or rows]
    medians = [statistics.median(speed_ups) for speed_ups in series]
    lowest, highest = min(map(min, series)), max(map(max, series))
    return (f"Two ranks are {min(medians):.2f} to {max(medians):.2f} times as fast as one "
            f"({which}; single passes: {lowest:.2f} to {highest:.2f}).")


def warning(records: list[dict]) -> str:
    """Return why the speed-ups may mislead, or an empty text."""
    if records[0]["cpus"] < 2:
        return "The two ranks shared one core: do not trust these speed-ups."
    busy_runs = sum((record["others"] or 0) > BUSY for record in records)
    if busy_runs:
        return (f"* Other programs used more than {BUSY:.0%} of the cores in {busy_runs} of "
                f"{len(records)} runs.")
    return ""


def table(records: list[dict]) -> str:
    """Return all that the demo prints, for its page."""
    lines = [HEAD, COLUMNS, *map(line, summary(records)), "", verdict(records), warning(records)]
    return "\n".join(lines).strip()


def draw(records: list[dict]) -> Figure:
    """Draw this machine's speed-ups on two ranks, and published ones on many GPUs."""
    rows = [row for row in summary(records) if row["speed_ups"]]
    title = f"{verdict(records)}\n{warning(records)}".replace(" (", "\n(").strip()
    limit = 0.4 + max([2, *(max(row["speed_ups"]) for row in rows)])
    figure, (bars, curve) = style.make_figure(
        max(4.8, 2.4 + 0.42 * len(rows)), 1, 2, width_ratios=(1.1, 1), title=title)
    for y, row in enumerate(rows):
        median, low, high = (of(row["speed_ups"]) for of in (statistics.median, min, max))
        bars.barh(y, median, 0.7, xerr=[[median - low], [high - median]], capsize=4,
                  color=style.LIBRARIES[style.CHAPTERS[row["chapter"]]])
        bars.text(limit, y, f"{median:.2f}", ha="right", va="center")
    bars.axvline(1, color=style.IDEAL)
    bars.set_yticks(range(len(rows)), [row["name"] + " *" * row["busy"] for row in rows])
    bars.tick_params(axis="y", length=0)
    bars.set(title="here: one batch, shared", xlabel="times as fast as one rank",
             xlim=(0, limit), ylim=(len(rows) - 0.5, -0.5))

    published = pandas.read_csv(RECORDS / "published.csv").query("group in ('A', 'B')")
    gpus = published.nodes * published.gpus
    base = published.base_images_per_second / published.base_gpus
    curve.plot([1, 1200], [1, 1200], color=style.IDEAL, linewidth=1)
    curve.plot(gpus, published.images_per_second / base, "o", color=style.MEASURED)
    mlperf = pandas.read_csv(RECORDS / "mlperf_v3.0_resnet50.csv")
    mlperf = mlperf[mlperf.system.str.startswith("NVIDIA")].sort_values("gpus")
    few, many = mlperf.iloc[0], mlperf.iloc[-1]
    sooner = few.seconds_to_train / mlperf.seconds_to_train
    curve.plot(mlperf.gpus / few.gpus, sooner, "D-", color=style.MEASURED, linewidth=1,
               markerfacecolor="white")
    curve.text(1200, 1.2, f"diamonds: time\nto accuracy, {few.gpus}\nto {many.gpus:,} GPUs: "
               f"x {sooner.iloc[-1]:.0f}", ha="right")
    curve.text(4.4, 300, "dots: images/s")
    curve.set(title="published runs", xlabel="times as many GPUs",
              ylabel="times as fast", xscale="log", yscale="log", xlim=(4, 1200), ylim=(1, 1200))
    for axis in curve.xaxis, curve.yaxis:
        axis.set_major_formatter("{x:.0f}")
    style.add_footer(
        figure, f"Left: {rows[0]['processor']}, cores: {rows[0]['cpus']}, one thread per rank; "
        f"passes: {len(rows[0]['speeds'])}, median and range. Right: dots: ResNet, Inception, VGG, "
        "the batch grows with the GPUs; each over one GPU of its baseline (of 1, 8 or 16) "
        "(assets/records/published.csv); diamonds: MLPerf v3.0, ResNet-50; line: perfect scaling.")
    return figure


def main():
    parser = Parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results",
                        help="folder for records and figure (default: results)")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    figure = (FIGURES if folder.resolve() == RECORDS else folder) / "demo.png"
    measured = []

    def show_results():
        draw(measured).savefig(figure, dpi=style.DPI)
        show("\n".join(["", COLUMNS, *map(line, summary(measured)), "", verdict(measured),
                        warning(measured)]))

    def end_first_pass():
        show_results()
        show(f"This is one pass; {os.path.relpath(figure)} draws it. {REPEATS - 1} more, each "
             "about as long, give the ranges. Ctrl-C leaves them out.\n")

    def show_row(record):
        measured.append(record)
        if not record["repeat"] and "difference" not in record:
            row, = [row for row in summary(measured) if row["speeds"]
                    and (row["name"], row["ranks"]) == (record["name"], record["ranks"])]
            show(line(row))

    show(f"{HEAD}\n{COLUMNS}")
    run_study(folder / "demo.jsonl", plan(end_first_pass), measure, show_row)
    show_results()
    show("A second rank pays off when it saves more computing than its communication costs.\n\n"
         f"records: {os.path.relpath(folder / 'demo.jsonl')}   picture: {os.path.relpath(figure)}")


if __name__ == "__main__":
    main()
