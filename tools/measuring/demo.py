"""Train the network of every chapter on 1 and on 2 ranks; print what each costs, row by row, and draw it.

Chapter 2 comes last: where Horovod is not built yet, that is done when all others have been shown.
"""

import fcntl
import math
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas
from launch import ROOT, launch, missing
from matplotlib.figure import Figure
from one_line import Parser
from records import FIGURES, RECORDS, refusal
from runs import Runs, end_with_the_study, said
from tqdm import tqdm

from tools import style
from tools.measuring.parameters import parameters

DIGITS = ("--dataset", "digits", "--global-batch-size", 64)
EXACT = (*DIGITS, "--precision", "fp64")
SMALL = ("--width", 256, "--layers", 8, "--epochs", 2)  # chapter 5's network
LARGE = ("--dataset", "synthetic", "--image-size", 48, "--model", "resnet18", "--global-batch-size", 64, "--lr", 0.01,
         "--epochs", 1, "--max-steps", 8)  # of which five warm up
RUNS = [  # chapter, name, ranks, flags, the name of the row on one rank that it is compared with
    ("01_single_node", "1  PyTorch", 1, EXACT, None),
    ("03_ddp", "3  PyTorch's DDP", 2, EXACT, "1  PyTorch"),
    ("01_single_node", "1  a larger network", 1, LARGE, None),
    ("03_ddp", "3  a larger network, DDP", 2, LARGE, "1  a larger network"),
    ("04_deepspeed", "4  DeepSpeed", 1, DIGITS, None),
    ("04_deepspeed", "4  DeepSpeed", 2, DIGITS, "4  DeepSpeed"),
    ("05_zero", "5  DeepSpeed's ZeRO", 1, (*DIGITS, *SMALL), None),
    ("05_zero", "5  DeepSpeed's ZeRO", 2, (*DIGITS, *SMALL), "5  DeepSpeed's ZeRO"),
    ("05_zero/fsdp.py", "5  PyTorch's FSDP", 1, (*EXACT, *SMALL), None),
    ("05_zero/fsdp.py", "5  PyTorch's FSDP", 2, (*EXACT, *SMALL), "5  PyTorch's FSDP"),
    ("01_single_node/main_tf.py", "1  TensorFlow", 1, EXACT, None),
    ("02_horovod/pytorch", "2  Horovod, PyTorch", 2, EXACT, "1  PyTorch"),
    ("02_horovod/tensorflow", "2  Horovod, TensorFlow", 2, EXACT, "1  TensorFlow"),
]
EQUAL = 1e-8  # of parameters near 1, in fp64: rounding leaves eight digits and more alone
HEAD = """\
Each row trains a network to read handwritten digits, with 64 images in every step.
A rank is one process that trains. Two ranks take 32 of the 64 images each, and then
average what they have learned from them, so that both have the same network again.
The larger network trains on larger images without a meaning, for its speed alone.

  images/s  images learned from in a second
  speed-up  images/s, divided by those of the same training on one rank
  read      the share of 360 new digits that it reads rightly
  same      has it the parameters that one rank arrives at? (Blank: cannot be told.)
"""
COLUMNS = f"{'chapter, trained with':<25} {'ranks':>5} {'images/s':>9} {'speed-up':>9} {'read':>8} {'same':>5}"


def train(chapter: str, name: str, ranks: int, flags: tuple, against: str | None, folder: Path) -> dict:
    """The record of a run, with how far its parameters are from those of the row that it is compared with.

    difference is None where there is none, or where it computes with too few digits to tell. The folder keeps the
    parameters of the rows on one rank.
    """
    if "fp64" not in flags:
        return launch(chapter, ranks, *flags) | {"difference": None}
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary, "checkpoint")
        record = launch(chapter, ranks, *flags, "--checkpoint", checkpoint)
        found = parameters(checkpoint)
    first = folder / f"{against or name}.npy"
    if against is None:
        np.save(first, found)
    known = against and first.exists()
    return record | {"difference": float(abs(found - np.load(first)).max()) if known else None}


# What is printed and drawn

def compared(record: dict, against: str | None, before: list[dict]) -> dict:
    """The record with its images/s divided by those of the row that it is compared with; None if there is none."""
    one = [each["images_per_second"] for each in before if (each["name"], each["ranks"]) == (against, 1)]
    return record | {"speed_up": record["images_per_second"] / one[0] if one else None}


def row(record: dict) -> str:
    """A line of the table."""
    speed_up = "" if record["speed_up"] is None else f"{record['speed_up']:.2f}"
    read = f"{record['test_accuracy']:.1%}" if record["dataset"] == "digits" else ""
    same = "" if record["difference"] is None else "yes" if record["difference"] < EQUAL else "NO"
    return (f"{record['name']:<25} {record['ranks']:>5} {record['images_per_second']:>9,.0f} {speed_up:>9} {read:>8} "
            f"{same:>5}").rstrip()


def verdict(records: list[dict]) -> str:
    """In how many programs more ranks are faster, in one sentence."""
    pairs = [record for record in records if record["speed_up"] is not None]
    if not pairs:
        return "No program ran on two ranks here."
    faster = sum(record["speed_up"] > 1 for record in pairs)
    best, worst = max(pairs, key=lambda each: each["speed_up"]), min(pairs, key=lambda each: each["speed_up"])
    remark = ""
    if best["speed_up"] > 2.2:
        remark = " More than twice is more than they can give: other programs slowed the one rank."
    elif best["cpus"] == 1:
        remark = " They shared one core."
    return (f"Two ranks were faster than one in {faster} of {len(pairs)} programs: from {worst['speed_up']:.2f} to "
            f"{best['speed_up']:.2f} times.{remark}")


def table(records: pandas.DataFrame) -> str:
    """All that the demo prints of its records, for the README."""
    found = records.astype(object).where(records.notna(), None).to_dict("records")  # None where pandas has NaN
    return "\n".join([HEAD, COLUMNS, *map(row, found), "", verdict(found)])


def draw(records: list[dict]) -> Figure:
    """A bar for each program: how many times as fast two ranks are as one, and what a step of theirs is made of."""
    pairs = [record for record in records if record["speed_up"] is not None]
    figure, axis = style.picture(2.1 + 0.4 * len(pairs), title=textwrap.fill(verdict(records), 76))
    longest = max([2, *(record["speed_up"] for record in pairs)])
    columns = {"a step computes": 1.62 * longest, "and waits": 2.05 * longest}
    for name, x in columns.items():
        axis.text(x, -1, name, va="center", ha="right")
    for place, record in enumerate(pairs):
        library = style.CHAPTERS.get(record["chapter"])  # a new chapter may have none: black
        axis.barh(place, record["speed_up"], 0.7, color=style.LIBRARIES.get(library, style.MEASURED))
        step = 1000 * record["step_seconds"]
        computes = step * record["speed_up"] / 2  # what one rank would take for half of the images
        for milliseconds, x in zip((computes, max(0, step - computes)), columns.values()):
            axis.text(x, place, f"{milliseconds:.{1 if milliseconds < 100 else 0}f} ms", va="center", ha="right")
    axis.axvline(1, ymax=len(pairs) / (len(pairs) + 1), color=style.IDEAL)
    axis.set_yticks(range(len(pairs)), [record["name"] for record in pairs])
    axis.tick_params(axis="y", length=0)
    axis.set(xlim=(0, 2.1 * longest), ylim=(len(pairs) - 0.5, -1.5),
             xticks=range(math.floor(longest) + 1), xlabel="times as fast as one rank")
    axis.xaxis.label.set(x=0, horizontalalignment="left")
    if records:
        style.foot(figure, "Two ranks win where a step computes for longer than it sends gradients and waits. "
                   f"{records[0]['processor']}, {records[0]['cpus']} cores, one thread a rank, one run")
    return figure


# What runs

@contextmanager
def sign_of_life(words: str, bar: tqdm) -> Iterator[None]:
    """On a terminal the bar's clock goes on; elsewhere a line every ten seconds says what is under way."""
    ended = threading.Event()

    def tell():
        seconds = 0
        while not ended.wait(1):
            seconds += 1
            if not bar.disable:
                bar.refresh()
            elif seconds % 10 == 0:
                print(f"  ({words}: {seconds} s)", flush=True)

    bar.set_description(words)
    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def measure(plan: list[tuple], runs: Runs, records: list[dict], folder: Path) -> None:
    """Do the runs of the plan that have not been done, and print the row of each as soon as it is there."""
    with tqdm(plan, unit="run", disable=None, leave=False) as bar:
        for run in bar:
            _, name, ranks, _, against = run
            with sign_of_life(f"chapter {name}, {ranks} rank{'s' * (ranks > 1)}", bar):
                result = runs.once(as_dict(run), lambda: compared(
                    train(*run, folder) | {"name": name}, against, records))  # noqa: B023
            records.append(result)
            bar.write(row(result))
            sys.stdout.flush()


def as_dict(run):
    chapter, name, ranks, flags, _ = run
    return {"chapter": chapter, "name": name, "ranks": ranks, "flags": " ".join(map(str, flags))}


def build_horovod() -> None:
    """Have set-up build Horovod, with what it prints in sight, where it has not been tried."""
    if "not built yet" in (missing("02_horovod") or ""):
        print("\nNow Horovod is built for chapter 2, once: minutes. Ctrl-C keeps what was measured.\n", flush=True)
        subprocess.run([sys.executable, str(ROOT / "tools/environment/setup.py"), "--venv", sys.prefix])
        print(f"\n{COLUMNS}", flush=True)


def only_one(results: Path, refuse: Callable[[str], None]):
    """Lock the folder until the file that this returns is closed."""
    file = open(results / "demo.lock.part", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        refuse(f"another demo writes into {results}: wait for its end")
    return file


def show(results: Path) -> None:
    """The whole demo, into this folder; what an earlier one has left unfinished is not done again."""
    parts, done = results / "demo.parameters", results / "demo.jsonl.part"
    later = [run for run in RUNS if run[0].startswith("02")]
    runs, records = Runs(done), []
    possible = [run for run in RUNS if not missing(run[0])]
    if all(runs.has(as_dict(run)) for run in possible):  # it was finished, without a compiler
        done.unlink(missing_ok=True)
        shutil.rmtree(parts, ignore_errors=True)
        runs = Runs(done)
    parts.mkdir(exist_ok=True)
    print(HEAD, COLUMNS, sep="\n", flush=True)
    measure([run for run in RUNS if run not in later], runs, records, parts)
    build_horovod()
    reason = missing("02_horovod")
    if reason:
        print(f"chapter 2 is left out: {reason}")
    else:
        measure(later, runs, records, parts)
    figure = (FIGURES if results.resolve() == RECORDS else results) / "demo.png"
    draw(records).savefig(figure, dpi=style.DPI)
    runs.publish(results / "demo.jsonl", keep=bool(reason))  # a demo after make setup may add chapter 2
    if not reason:
        shutil.rmtree(parts)
    print(f"\n{verdict(records)}\nA second rank pays where a step computes for longer than the ranks take to send and "
          f"wait.\n\nrecords: {os.path.relpath(results / 'demo.jsonl')}   picture: {os.path.relpath(figure)}")


def main():
    parser = Parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results", help="for the records and the figure")
    results = parser.parse_args().folder
    if reason := refusal(results):
        sys.exit(f"demo: {reason}")
    end_with_the_study()
    try:
        results.mkdir(exist_ok=True)
        lock = only_one(results, parser.error)
    except OSError as problem:
        parser.error(f"cannot write into {results}: {problem.strerror}")
    stays = f"what was measured stays in {os.path.relpath(results)}, and make demo goes on"
    try:
        show(results)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
        sys.exit(f"demo: {said(problem)}\n{stays}")
    except OSError as problem:
        sys.exit(f"{problem}: mend that; {stays}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted; {stays}")
    finally:
        lock.close()


if __name__ == "__main__":
    main()
