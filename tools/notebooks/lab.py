"""What 03_ddp/scaling.ipynb runs, draws and says of a lab: two nodes, whose link is turned down while they train.

A run is a dict, one line of assets/records/lab_live.jsonl: `rates` before and after; `turned`, when lab.sh was told and
when it had done it; `epochs`, [when it was printed, images/s] of each. Times are seconds from the first step.
"""

import io
import os
import queue
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from IPython.display import Image, display
from records import ROOT, published

from tools.pages.style import COMMUNICATION, MEASURED, PREDICTED, Picture, head, picture

LAB = ROOT / "submit" / "lab.sh"
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}  # bit/s
WAIT = 100  # seconds until lab.sh or the training has to say something, on a busy machine, too
PAUSE = 0.4  # seconds between two drawings: each takes a tenth, from a core that a rank wants


class NoLab(Exception):
    """No lab can come up here, or it ended too soon; the message says why."""


# --- the lab ---

def command(*words: object) -> list[str]:
    return ["bash", str(LAB), *map(str, words)]


def environment() -> dict[str, str]:
    """A lab of this process's own, whatever other labs there are."""
    return {name: value for name, value in os.environ.items() if name != "LAB_FOLDER"} | {"LAB": f"live-{os.getpid()}"}


def call(*words: object) -> None:
    """Run lab.sh, and show the command as one would type it. Raises NoLab with what it says."""
    print("submit/lab.sh", *words)
    try:
        done = subprocess.run(command(*words), env=environment(), stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=WAIT)
    except subprocess.TimeoutExpired:
        raise NoLab(f"`submit/lab.sh {words[0]}` did not end in {WAIT} s") from None
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


def printed(*words: object) -> Iterator[tuple[float, str]]:
    """What a command on the nodes prints, each line with its time. Raises NoLab where it fails or falls silent."""
    print("submit/lab.sh", *words)
    found, lines = queue.Queue(), []
    process = subprocess.Popen(command(*words), cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def read():  # a thread: so a line has its time, whatever is drawn meanwhile
        for line in process.stdout:
            found.put((time.monotonic(), line.rstrip()))
        found.put((time.monotonic(), None))

    threading.Thread(target=read, daemon=True).start()
    try:
        while True:
            try:
                now, line = found.get(timeout=WAIT)
            except queue.Empty:
                raise NoLab(f"the training printed nothing for {WAIT} s") from None
            if line is None:
                break
            lines.append(line)
            yield now, line
    finally:
        process.terminate()  # has no effect if it has ended; what it started on the nodes ends with the lab
        code = process.wait()
    if code:
        raise NoLab(f"the training failed: {' '.join(lines[-1:])}")


# --- the run ---

def read(line: str) -> dict | float | None:
    """What a line of the training says: the set-up's numbers, an epoch's images/s, or None."""
    for pattern, names in ((r"\w+: .* images, \w+: ([\d,]+) parameters", ("parameters",)),
                           (r"ranks: (\d+), nodes: (\d+), .* (\d+) global", ("ranks", "nodes", "global_batch_size"))):
        if found := re.match(pattern, line):
            return {name: int(value.replace(",", "")) for name, value in zip(names, found.groups())}
    found = re.match(r"epoch \d+/\d+: .* ([\d,]+) images/s", line)
    return float(found[1].replace(",", "")) if found else None


def turned_down(first: str, then: str, after: int, epochs: int) -> dict:
    """Train on two nodes, turn the link from one rate to the other after so many epochs, and draw it as it happens.

    Where no lab can come up, say why, and draw the recorded run.
    """
    shown = display(draw_turned({"rates": [first, then], "epochs": []}), display_id=True)
    drawn = 0.0

    def watch(run):
        nonlocal drawn
        if time.monotonic() > drawn + PAUSE:
            shown.update(quickly(draw_turned(run)))
            drawn = time.monotonic()

    try:
        run = trained(first, then, after, epochs, watch)
    except NoLab as problem:
        run = recorded()
        print(f"No lab here: {problem}. This is the recorded run, on {run['processor']}.")
    shown.update(draw_turned(run))
    return run


def trained(first: str, then: str, after: int, epochs: int, watch: Callable[[dict], None]) -> dict:
    """The run of turned_down; after each epoch it is shown to `watch`."""
    run = {"rates": [first, then], "epochs": []}
    flags = ["--global-batch-size", 64, "--epochs", epochs]
    with nodes(2, first), closing(printed("run", "-n", 2, "python", "03_ddp/main.py", *flags)) as lines:
        for now, line in lines:
            said = read(line)
            if isinstance(said, dict):
                run |= said
                began = now
            elif said:
                run["epochs"].append([now - began, said])
                if len(run["epochs"]) == after:
                    asked = time.monotonic()
                    call("rate", then)
                    run["turned"] = [asked - began, time.monotonic() - began]
                watch(run)
    if not all(halves(run)):
        raise NoLab("too few epochs were printed before or after the link was turned")
    return run


def recorded() -> dict:
    """The run of assets/records/lab_live.jsonl."""
    return published("lab_live.jsonl")[-1]


def halves(run: dict) -> tuple[list[float], list[float]]:
    """The images/s of the epochs that ended before the link was turned, and of those that began after it."""
    asked, done = run.get("turned", (float("inf"), float("inf")))
    starts = [0.0, *(end for end, _ in run["epochs"])]
    return ([speed for end, speed in run["epochs"] if end <= asked],
            [speed for start, (_, speed) in zip(starts, run["epochs"]) if start >= done])


# --- what bytes and rates predict ---

def bits(rate: str) -> float:
    """100mbit, as tc writes it, in bit/s."""
    return float(rate[:-4]) * UNITS[rate[-4]]


def sent(run: dict) -> float:
    """Bytes that a node sends in a step: a ring's share of the fp32 gradients."""
    return 2 * (run["ranks"] - 1) / run["ranks"] * 4 * run["parameters"]


def predicted(run: dict) -> float:
    """Images/s after the turn: the step as it was before, and what the same bytes take longer on the wire."""
    before = run["global_batch_size"] / statistics.median(halves(run)[0])
    slow, fast = (8 * sent(run) / bits(rate) for rate in reversed(run["rates"]))
    return run["global_batch_size"] / (before + slow - fast)


# --- what is seen ---

def spoken(rate: str) -> str:
    """100mbit as a sentence has it: 100 Mbit/s."""
    return f"{rate[:-4]} {rate[-4].upper().replace('K', 'k')}bit/s"


def draw_turned(run: dict) -> Picture:
    """Images/s of each epoch over time, as far as there are any; dashed, what is predicted once the link is turned."""
    figure, axis = picture(3.3)
    times, speeds = zip(*run["epochs"]) if run["epochs"] else ((), ())
    entries = {"an epoch": axis.plot(times, speeds, "o-", color=MEASURED)[0]}
    most, end = max([*speeds, 1000]), max([*times, 4])
    axis.set(xlabel="seconds of training", ylabel="images/s", xlim=(0, 1.05 * end), ylim=(0, 1.3 * most))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.text(0.02 * end, 1.18 * most, spoken(run["rates"][0]), va="center")
    if "turned" in run:
        asked, done = run["turned"]
        entries["the link is turned"] = axis.axvline(asked, ls=":", color=COMMUNICATION)
        axis.text(asked + 0.02 * end, 1.18 * most, spoken(run["rates"][1]), va="center")
        entries["predicted"], = axis.plot([done, 1.05 * end], [predicted(run)] * 2, "--", color=PREDICTED)
    head(figure, "main.py on two nodes, a rank on each", entries)
    return figure


def quickly(figure: Picture) -> Image:
    """The same in a third of the time, for what is seen for a moment."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=96)
    width, height = figure.get_size_inches()
    return Image(file.getvalue(), width=round(96 * width), height=round(96 * height))


def on_turned(run: dict) -> str:
    """Both halves in numbers, their ratio beside the predicted one, and whether the wire explains it."""
    batch, (before, after) = run["global_batch_size"], halves(run)
    fast, slow = (statistics.median(half) for half in (before, after))
    wire = [f"{8e3 * sent(run) / bits(rate):.1f} ms at {spoken(rate)}" for rate in run["rates"]]
    text = (f"In a step each node sends {sent(run):,.0f} bytes: {wire[0]}, {wire[1]}. A step took "
            f"{1e3 * batch / fast:.1f} ms, so {1e3 * batch / predicted(run):.1f} ms are predicted, "
            f"{predicted(run) / fast:.2f} times the images/s. Measured (medians): {fast:,.0f}, then {slow:,.0f} "
            f"images/s, **{slow / fast:.2f} times**; the prediction is {abs(predicted(run) / slow - 1):.0%} "
            f"{'above' if predicted(run) > slow else 'below'} that. ")
    if slow >= fast:
        return text + "They did not fall: here the steps wait for something else than the wire."
    if min(before) <= max(after):
        return text + "They fell, but the halves overlap: something else than the wire counts, too, such as other work."
    return text + "Every epoch before was faster than every one after."
