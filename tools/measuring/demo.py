"""Train the network of every chapter on 1 and on 2 ranks; print what each costs, row by row, and draw it.

Chapter 2 comes last: where Horovod is not built yet, that is done when all others have been shown.
"""

import fcntl
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas
import psutil
from launch import ROOT, launch, missing
from matplotlib.figure import Figure
from one_line import Parser
from records import FIGURES, RECORDS, refusal
from runs import Runs, end_with_the_study, said
from tqdm import tqdm

from tools import style
from tools.measuring.parameters import parameters

CPU = ("--device", "cpu")  # two ranks cannot share a GPU, and one on a GPU is no measure for two on CPUs
DIGITS = (*CPU, "--dataset", "digits", "--global-batch-size", 64)
EXACT = (*DIGITS, "--precision", "fp64")
SMALL = ("--width", 256, "--layers", 8, "--epochs", 2)  # chapter 5's network
LARGE = (*CPU, "--dataset", "synthetic", "--image-size", 48, "--model", "resnet18", "--global-batch-size", 64,
         "--lr", 0.01, "--epochs", 1, "--max-steps", 8)  # of which five warm up
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
BUSY = 0.1  # the share of the cores, used by other programs, from which on the demo says so
EQUAL = 1e-8  # of parameters near 1, in fp64: rounding leaves eight digits and more alone
HEAD = """\
Each row trains a network to read handwritten digits, with 64 images in every step.
A rank is one process that trains. Two ranks take 32 of the 64 images each, and then
average their gradients, so that both have the same network again. The larger network
trains on random images, only to measure speed. All run on the CPU.

  images/s  training images per second
  speed-up  images/s, divided by those of the same training on one rank
  accuracy  the share of 360 new digits that it reads correctly
  same      same parameters as one rank? (Blank: cannot be told.)
"""
COLUMNS = f"{'chapter, trained with':<25} {'ranks':>5} {'images/s':>9} {'speed-up':>9} {'accuracy':>8} {'same':>5}"


def train(chapter: str, name: str, ranks: int, flags: tuple, against: str | None, folder: Path) -> dict:
    """Return the record of a run, with `difference` and `others` added.

    difference: the largest of its parameters from those of the row that it is compared with; None where there is no
    such row, or where it computes with too few digits to tell. The folder keeps the parameters of rows on one rank.
    others: the share of the machine's cores that other programs used meanwhile, from 0 to 1.
    """
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = Path(temporary, "checkpoint")
        exact = ("--checkpoint", checkpoint) if "fp64" in flags else ()
        before = core_seconds()
        record = launch(chapter, ranks, *flags, *exact)
        elapsed, others = (after - start for after, start in zip(core_seconds(), before))
        record |= {"difference": None, "others": max(0, others / elapsed)}
        if exact:
            row = parameters(checkpoint)
            first = folder / f"{against or name}.npy"
            if against is None:
                np.save(first, row)
            elif first.exists():
                record["difference"] = float(abs(row - np.load(first)).max())
    return record


def core_seconds() -> tuple[float, float]:
    """Return the core seconds that have passed on this machine, and those that programs other than ours have used."""
    times, own = psutil.cpu_times(), os.times()
    passed = sum(times) - getattr(times, "guest", 0) - getattr(times, "guest_nice", 0)  # which user has, too
    used = passed - times.idle - getattr(times, "iowait", 0)
    return passed, used - sum(own[:4])  # user and system time of this process and of its children


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


def busy(records: list[dict]) -> str:
    """A sentence if other programs used the cores while the rows were measured; else nothing."""
    shares = [record["others"] for record in records]
    if max(shares, default=0) < BUSY:
        return ""
    return (f"Other programs used up to {max(shares):.0%} of the cores meanwhile ({statistics.median(shares):.0%} in "
            "the median row): run it again on an idle machine before you trust a speed-up.")


def verdict(records: list[dict]) -> str:
    """In how many programs more ranks are faster, and whether the machine was busy."""
    pairs = [record for record in records if record["speed_up"] is not None]
    if not pairs:
        return "No program ran on two ranks here."
    speed_ups = [record["speed_up"] for record in pairs]
    cores = " They shared one core." if pairs[0]["cpus"] == 1 else ""
    return (f"Two ranks were faster than one in {sum(speed > 1 for speed in speed_ups)} of {len(pairs)} programs: from "
            f"{min(speed_ups):.2f} to {max(speed_ups):.2f} times.{cores} {busy(records)}".strip())


def table(records: pandas.DataFrame) -> str:
    """All that the demo prints of its records, for the README."""
    found = records.astype(object).where(records.notna(), None).to_dict("records")  # None where pandas has NaN
    return "\n".join([HEAD, COLUMNS, *map(row, found), "", verdict(found)])


def draw(records: list[dict]) -> Figure:
    """On the left how much two ranks gain here, on the right what others have published of many GPUs."""
    pairs = [record for record in records if record["speed_up"] is not None]
    pairs.sort(key=lambda record: "larger" not in record["name"])
    figure, (here, elsewhere) = style.picture(max(4.4, 2 + 0.42 * len(pairs)), 1, 2, width_ratios=(1.25, 1),
                                             title="More ranks pay where a step computes for long")
    for place, record in enumerate(pairs):
        color = style.LIBRARIES["DDP"] if "larger" in record["name"] else style.ABSENT
        here.barh(place, record["speed_up"], 0.7, color=color)
        here.text(0.05, place, f"{record['speed_up']:.2f}", va="center",
                  color="white" if "larger" in record["name"] else "black")
    here.axvline(1, color=style.IDEAL)
    here.set_yticks(range(len(pairs)), [record["name"] for record in pairs])
    here.tick_params(axis="y", length=0)
    here.set(title="two ranks here", xlabel="times as fast as one rank\n(grey: a tiny network)",
             xlim=(0, max([2, *(record["speed_up"] for record in pairs)])), ylim=(len(pairs) - 0.5, -0.5))
    published = pandas.read_csv(RECORDS / "published.csv").query("group in ('A', 'B')")
    gpus = published.nodes * published.gpus
    speed_ups = published.images_per_second / (published.base_images_per_second / published.base_gpus)
    elsewhere.plot([1, gpus.max()], [1, gpus.max()], color=style.IDEAL, linewidth=1)
    elsewhere.plot(gpus, speed_ups, "o", color=style.LIBRARIES["DDP"])
    elsewhere.set(title="GPUs, published", xlabel="GPUs\n(large networks)", ylabel="times as fast as one GPU",
                  xscale="log", yscale="log", xlim=(4, 1200), ylim=(4, 1200))
    for axis in elsewhere.xaxis, elsewhere.yaxis:
        axis.set_major_formatter("{x:.0f}")
    if records:
        machine = f"{records[0]['processor']}, {records[0]['cpus']} cores, one thread per rank, one run"
        style.foot(figure, f"Left: {machine}. {busy(records)} Right: ResNet, Inception, VGG; sources in "
                   "assets/records/published.csv; the line is perfect scaling.")
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
