"""Do more ranks pay? Chapter 3 where a step computes for longer, on this machine and over a slow link; for the demo.

A run on more ranks is compared with one on fewer, and what is said is chosen by comparing the numbers.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas
from launch import ROOT, command, environment, launch, machine
from runs import said

WEAK = ("--dataset", "synthetic", "--image-size", 32, "--model", "resnet18", "--batch-size", 32, "--lr", 0.01,
        "--epochs", 1, "--max-steps", 8)  # of which five warm up
BITS = {"1gbit": 1e9}  # a second, by tc's name of a link
RUNS = [("03_ddp", 1, "none"), ("03_ddp", 2, "none"), ("03_ddp", 2, "1gbit")]  # chapter, ranks, link
CLOSE = 0.05  # speeds that differ by less count as the same


def label(record: pandas.Series) -> str:
    """The chapter, and the stage where there is one."""
    stage = record.get("stage")
    return record["chapter"] if pandas.isna(stage) else f"{record['chapter']}, stage {stage:.0f}"


def lab(*words: object, **options: object) -> subprocess.CompletedProcess:
    """submit/lab.sh with these words, on a lab of this process's own."""
    env = environment() | {"LAB": f"demo-{os.getpid()}", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(["bash", str(ROOT / "submit" / "lab.sh"), *map(str, words)], env=env, text=True, cwd=ROOT,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


@contextmanager
def nodes_up(nodes: int, link: str) -> Iterator[None]:
    """A lab of so many nodes, taken down whatever happens, but SIGKILL. Raises as subprocess.run(check=True)."""
    before = signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))  # the terminal is closed
    try:
        lab("up", nodes, "--rate", link, timeout=60, check=True)
        yield
    finally:
        lab("down", timeout=60, start_new_session=True)  # a second Ctrl-C is not for it; no lab is up: it says so
        signal.signal(signal.SIGHUP, before)


def elsewhere() -> float:
    """Seconds that the processors have worked by now, or the host has taken, but for this process's children.

    0 where the kernel does not say.
    """
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not Path("/proc/stat").exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - found.ru_utime - found.ru_stime


def scale(chapter: str, ranks: int, link: str) -> dict:
    """The record of a run of WEAK, on nodes of a lab where there is a link.

    others: how many cores other programs had meanwhile. Where a lab cannot be, left_out says why.
    """
    since, others = time.perf_counter(), elsewhere()
    try:
        record = launch(chapter, ranks, *WEAK) if link == "none" else launch_on_nodes(chapter, ranks, link)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
        if link == "none":
            raise
        reason = (said(problem).splitlines() or [""])[-1].strip()
        found = {"chapter": chapter, "ranks": ranks, "dataset": "synthetic", "link": link, "left_out": reason}
        return found | machine()
    return record | {"others": max(0.0, (elsewhere() - others) / (time.perf_counter() - since))}


def launch_on_nodes(chapter, ranks, link):
    """The same as launch(), a rank a node."""
    words = command(chapter, 1, *WEAK)
    with tempfile.TemporaryDirectory() as folder, nodes_up(ranks, link):
        results = Path(folder, "results.jsonl")
        lab("run", "-n", ranks, *words, "--results", results, timeout=120, check=True)
        return json.loads(results.read_text()) | machine()


def compared(records: pandas.DataFrame) -> list[dict]:
    """Each program's run on the most ranks, against its run on the fewest, in the order of the records.

    computing: the seconds in which the fewest ranks do a rank's part of the step; waiting: the rest of the step;
    share: of the step that is computing; even: the share at which all ranks are as fast as the fewest.
    """
    found, records = [], records.reset_index(drop=True)
    digits = records["dataset"] == "digits"
    for name, runs in records[digits].groupby(records.apply(label, axis=1), sort=False):
        first, last = (runs.loc[runs["ranks"] == ranks].iloc[0] for ranks in (runs["ranks"].min(), runs["ranks"].max()))
        if last["ranks"] > first["ranks"]:
            found.append(comparison(name, first, last))
    weak = records[~digits]
    for _, last in weak[weak["ranks"] > 1].iterrows():
        found.append(comparison(last["chapter"], weak.iloc[0], last))
    return found


def comparison(name, one, more):
    """Of the two runs, which are of one rank and more, or of some and more."""
    link, left_out = (None if pandas.isna(more.get(key)) else more[key] for key in ("link", "left_out"))
    here = {"name": name, "chapter": more["chapter"], "digits": more["dataset"] == "digits", "ranks": more["ranks"],
            "link": link, "left_out": left_out}
    if left_out:
        return here
    computing = more["batch_size"] * one["ranks"] / one["images_per_second"]
    step = more["batch_size"] * more["ranks"] / more["images_per_second"]
    sent = more["gradient_bytes"] * 2 * (more["ranks"] - 1) / more["ranks"]
    return here | {"speed": more["images_per_second"], "ratio": more["images_per_second"] / one["images_per_second"],
                   "computing": computing, "waiting": max(0.0, step - computing), "share": min(1.0, computing / step),
                   "even": one["ranks"] / more["ranks"], "megabytes": more["gradient_bytes"] / 1e6,
                   "wire": 8 * sent / BITS[link] if link else None,
                   "cpus": more["cpus"], "others": more.get("others", 0), "others_of_one": one.get("others", 0)}


def rate(link: str) -> str:
    """A link's speed as people write it."""
    return f"{BITS[link] / 1e9:g} Gbit/s"


def answer(ratio: float) -> str:
    """Whether ranks that are so many times as fast as one pay."""
    return "yes" if ratio > 1 + CLOSE else "no" if ratio < 1 - CLOSE else "just even"


def why(found: dict) -> str:
    """What made ranks faster than one, or not: the causes that show in the numbers."""
    cpus, ranks = found["cpus"], found["ranks"]
    if found["ratio"] > ranks * (1 + CLOSE):
        return (f"more than {ranks} ranks can give: something slowed the one (other programs had "
                f"{found['others_of_one']:.1f} of {cpus} cores); measure again")
    causes = [f"{ranks} ranks share {cpus} core{'s' * (cpus > 1)}"] * (cpus < ranks)
    if cpus >= ranks and cpus - found["others"] < ranks - 0.25:
        causes.append(f"other programs had {found['others']:.1f} of {cpus} cores")
    causes.append(f"a step computes for {milliseconds(found['computing'])} and waits for "
                  f"{milliseconds(found['waiting'])}")
    if found["link"]:
        longer = "longer" if found["wire"] > found["computing"] else "no longer"
        causes.append(f"its {found['megabytes']:.1f} MB take {milliseconds(found['wire'])} on the link, {longer} than "
                      "the computing")
    return ";\n    ".join(causes)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"


def table(records: pandas.DataFrame) -> str:
    """The runs of WEAK as a table, each with a line below it that says whether its ranks pay, and why."""
    found = [each for each in compared(records) if not each["digits"]]
    if not found:
        return ""
    one = records[records["dataset"] != "digits"].iloc[0]
    size = f"{one['image_size']:.0f}x{one['image_size']:.0f}"
    lines = [f"Do {found[0]['ranks']} ranks pay? {one['model']}, synthetic images of {size}, {one['batch_size']:.0f} "
             "a rank (weak scaling).",
             "computing: what one rank takes for a step; waiting: what more ranks take beyond that, to send",
             "gradients and wait for each other.", "",
             f"{one['chapter']:>25} ranks images/s times one computing  waiting gradients",
             f"{'this machine':>25} {one['ranks']:>5} {one['images_per_second']:>8,.0f}"]
    answers = []
    for each in found:
        place = f"a node a rank, {rate(each['link'])}" if each["link"] else "this machine"
        lines.append(f"{place:>25} {each['ranks']:>5} " + (f"left out: {each['left_out']}" if each["left_out"] else (
            f"{each['speed']:>8,.0f} {each['ratio']:>9.2f} {milliseconds(each['computing']):>9} "
            f"{milliseconds(each['waiting']):>8} {each['megabytes']:>6.1f} MB")))
        if not each["left_out"]:
            answers += [f"{'At ' + rate(each['link']) if each['link'] else 'Here'}: {answer(each['ratio'])}, "
                     f"{each['ratio']:.2f} times the images/s of one rank:", f"    {why(each)}."]
    return "\n".join([*lines, "", *answers])
