"""What 03_ddp/scaling.ipynb runs and draws of a lab: two nodes, whose link is turned down while they train.

A run is a dict, one line of assets/records/lab_live.jsonl: `rates` before and after; `turned`, when lab.sh was told and
when it had done it; `epochs`, [when it was printed, images/s] of each. Times are seconds from the first step.
"""

import io
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from IPython.display import Image, display
from records import ROOT, published

from tools.style import COMMUNICATION, MEASURED, PREDICTED, Picture, head, picture

LAB = ROOT / "submit" / "lab.sh"
WAIT = 100  # seconds for a silent rank
PAUSE = 0.4  # seconds between two drawings: each takes a tenth, from a core that a rank wants


class NoLab(Exception):
    """No lab can come up here, or it ended too soon; the message says why."""


def command(*words: object) -> list[str]:
    return ["bash", str(LAB), *map(str, words)]


def environment() -> dict[str, str]:
    """A lab of this process's own, whatever other labs there are."""
    return {name: value for name, value in os.environ.items() if name != "LAB_FOLDER"} | {"LAB": f"live-{os.getpid()}"}


def call(*words: object) -> None:
    """Run lab.sh, and show the command as one would type it. Raises NoLab with what it says."""
    print("submit/lab.sh", *words)
    done = subprocess.run(command(*words), env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"`submit/lab.sh {words[0]}` failed"]
        raise NoLab(said[-1].removeprefix("lab.sh: "))


@contextmanager
def nodes(count: int, rate: str) -> Iterator[None]:
    """So many nodes within the block, taken down at its end, however it ends."""
    try:
        call("up", count, "--rate", rate)
        yield
    finally:  # in a session of its own, so that what interrupts the kernel does not reach it
        subprocess.run(command("down"), env=environment(), stdin=subprocess.DEVNULL, capture_output=True,
                       start_new_session=True)


@contextmanager
def started(*words: object) -> Iterator[subprocess.Popen]:
    """A command that runs on the nodes within the block."""
    print("submit/lab.sh", *words)
    with subprocess.Popen(command(*words), cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.terminate()  # what it started on the nodes ends with the lab


def trained(first: str, then: str, after: int, epochs: int, watch: Callable[[dict], None]) -> dict:
    """Train on two nodes, and turn the link from one rate to the other after so many epochs.

    After each epoch the run is shown to `watch`. Raises NoLab where this fails.
    """
    run, line = {"rates": [first, then], "epochs": []}, ""
    flags = ["--global-batch-size", 64, "--epochs", epochs, "--timeout", WAIT]
    with nodes(2, first), started("run", "-n", 2, "python", "03_ddp/main.py", *flags) as process:
        for line in process.stdout:
            if found := re.match(r"\w+: .* images, \w+: ([\d,]+) parameters", line):
                run["parameters"] = int(found[1].replace(",", ""))
            elif found := re.match(r"ranks: (\d+), nodes: (\d+), .* (\d+) global", line):
                run |= zip(("ranks", "nodes", "global_batch_size"), map(int, found.groups()))
                began = time.monotonic()
            elif found := re.match(r"epoch \d+/\d+: .* ([\d,]+) images/s", line):
                run["epochs"].append([time.monotonic() - began, float(found[1].replace(",", ""))])
                if len(run["epochs"]) == after:
                    asked = time.monotonic()
                    call("rate", then)
                    run["turned"] = [asked - began, time.monotonic() - began]
                watch(run)
        if process.wait():
            raise NoLab(f"the training failed: {line.strip()}")
    if not all(halves(run)):
        raise NoLab("too few epochs were printed before or after the link was turned")
    return run


def halves(run: dict) -> tuple[list[float], list[float]]:
    """The images/s of the epochs before the link was turned, and of those after it.

    In between are two: one ran meanwhile, and the next may have begun.
    """
    speeds = [speed for _, speed in run["epochs"]]
    before = sum(end <= run["turned"][0] for end, _ in run["epochs"]) if "turned" in run else len(speeds)
    return speeds[:before], speeds[before + 2:]


def on_turned(run: dict) -> str:
    """Medians of both halves."""
    halved = zip(run["rates"], halves(run))
    return ", ".join(f"{rate}: {statistics.median(half):,.0f} images/s" for rate, half in halved)


def turned_down(predicted: Callable, first: str, then: str, after: int, epochs: int) -> None:
    """The run of `trained`, drawn as it happens; where no lab can come up, why, and the recorded run.

    predicted: images/s once the link is turned, from those before, both rates in bit/s, and the run.
    """
    shown = display(draw_turned({"rates": [first, then], "epochs": []}, predicted), display_id=True)
    drawn = 0.0

    def watch(run):
        nonlocal drawn
        if time.monotonic() > drawn + PAUSE:
            shown.update(quickly(draw_turned(run, predicted)))
            drawn = time.monotonic()

    try:
        run = trained(first, then, after, epochs, watch)
    except NoLab as problem:
        run = published("lab_live.jsonl")[-1]
        print(f"No lab here: {problem}. This is the recorded run, on {run['processor']}.")
    shown.update(draw_turned(run, predicted))


def bits(rate: str) -> float:
    """100mbit, as tc writes it, in bit/s."""
    return float(rate[:-4]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate[-4]]


def draw_turned(run: dict, predicted: Callable) -> Picture:
    """Images/s of each epoch over time, as far as there are any; dashed, what is predicted once the link is turned."""
    figure, axis = picture(3.3)
    times, speeds = zip(*run["epochs"]) if run["epochs"] else ((), ())
    entries = {"an epoch": axis.plot(times, speeds, "o-", color=MEASURED)[0]}
    most, end = max([*speeds, 1000]), max([*times, 4])
    axis.set(xlabel="seconds of training", ylabel="images/s", xlim=(0, 1.05 * end), ylim=(0, 1.3 * most))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    turned, done = run.get("turned", (end, end))
    for start, rate, half in zip((0, turned), run["rates"], halves(run)):
        if half:
            axis.text(start + 0.02 * end, 1.18 * most, f"{rate}: median {statistics.median(half):,.0f}", va="center")
    if turned < end:
        expected = predicted(statistics.median(halves(run)[0]), *map(bits, run["rates"]), run)
        entries["the link is turned"] = axis.axvline(turned, ls=":", color=COMMUNICATION)
        entries[f"predicted: {expected:,.0f}"], = axis.plot([done, 1.05 * end], [expected] * 2, "--", color=PREDICTED)
    head(figure, "main.py on two nodes, a rank on each", entries)
    return figure


def quickly(figure: Picture) -> Image:
    """The same in a third of the time, for what is seen for a moment."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=96)
    return Image(file.getvalue())
