"""Train chapters 2 to 5 on the nodes of submit/lab.sh, over links of chosen speed. Records: lab.jsonl and, of
all-reduces, lab_allreduce.jsonl.

    python -m tools.measuring.lab --list          # the runs, and about how long all take
    python -m tools.measuring.lab                 # them; killed, it goes on where it was (same commit)
    python -m tools.measuring.lab --repeats 1 --steps 3 --folder /tmp/trial      # elsewhere, from any tree

With nothing else on the machine: the nodes share its cores. A lab of four nodes of the name `experiment` (or LAB) is up
meanwhile. Ranks that are alone run on as many nodes at the same time, and nothing passes between them: the base of all
predictions (lab_model.py). Four ranks on two cores say what crowding does, not what four nodes would do.
"""

import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch import ROOT, environment, machine, missing
from one_line import Parser, whole
from records import RECORDS, refusal
from runs import study

from tools.measuring.lab_model import PASSED, cluster_of, cost_model

LINKS = ("none", "1gbit", "100mbit")
SLOW = LINKS[1:]
CHAPTERS = (("02_horovod/pytorch", None), ("03_ddp", None), ("04_deepspeed", None), ("05_zero", 1), ("05_zero", 3))
CROWDED = (("03_ddp", None), ("05_zero", 1), ("05_zero", 3))  # on four nodes, too
NODES = 4
STEPS, WARM_UP, REPEATS = 5, 5, 3  # workshop.py leaves out the first five
WAY_STEPS = 3  # timed, of each way and repeat
PERCEPTRON = ("--width", 192, "--layers", 2)
BYTES = {"02_horovod/pytorch": 6505768, "03_ddp": 6505768, "04_deepspeed": 6505768, "05_zero": 2664232}  # of gradients
SIZES = (4096, 65536, 2**20, 6505768, 25 * 2**20)  # of all-reduces: the fourth is the cnn's gradients
WAYS = ("plain", "fp16", "accumulate", "batch", "bucket", "one")
SECONDS = {"start": {1: 3.5, 2: 4.5, 4: 9.0}, "compute": {1: 0.09, 2: 0.1, 4: 0.25}}  # seen while this was written


def batch_of(chapter: str) -> int:
    """Images of a rank in a step: enough that computing takes a tenth of a second."""
    return 1024 if chapter == "05_zero" else 64


def plan(repeats: int = REPEATS) -> list[dict]:
    """The runs, the same ones of a repeat side by side. What is of one repeat comes first."""
    runs = []

    def add(kind, programs, nodes, links, repeat, part=1):
        runs.extend({"kind": kind, "chapter": chapter, "stage": stage, "batch": batch_of(chapter) // part,
                     "nodes": nodes, "link": link, "repeat": repeat}
                    for chapter, stage in programs if not missing(chapter) for link in links)

    for repeat in range(repeats):
        if repeat == 0:
            add("alone", CHAPTERS, 1, ["none"], repeat)
        add("alone", CHAPTERS, 2, ["none"], repeat)
        add("weak", CHAPTERS, 2, LINKS, repeat)
        if repeat == 0:
            add("alone", CHAPTERS, 2, ["none"], repeat, 2)
            add("strong", CHAPTERS, 2, LINKS, repeat, 2)
            add("ways alone", CHAPTERS[1:2], 2, ["none"], repeat)
            add("ways", CHAPTERS[1:2], 2, SLOW, repeat)
            add("alone", CROWDED, NODES, ["none"], repeat)
            add("weak", CROWDED, NODES, LINKS, repeat)
            add("ways alone", CHAPTERS[1:2], NODES, ["none"], repeat)
    return runs


def plan_of_all_reduces() -> list[dict]:
    return [{"nodes": nodes, "link": link} for nodes in (2, NODES) for link in LINKS]


def bound(runs: list[dict], steps: int = STEPS) -> float:
    """About the seconds that these runs take, on the generous side: what the link passes, and what starting takes."""
    total = 0.0
    for run in runs:
        nodes, link = run["nodes"], cluster_of(run["nodes"], run["link"])
        if "kind" not in run:
            wire = sum(0.02 + cost_model.all_reduce_seconds(size, link) for size in SIZES)
            total += SECONDS["start"][nodes] + (1 + REPEATS) * wire
            continue
        size = BYTES[run["chapter"]] * PASSED.get((run["chapter"], run["stage"]), 1)
        wire = 0.0 if "alone" in run["kind"] else cost_model.all_reduce_seconds(size, link)
        compute = SECONDS["compute"][nodes]
        if run["kind"] == "ways":  # with the batches of accumulate and batch
            seconds = (2 + REPEATS * (WAY_STEPS + 1)) * (len(WAYS) * (compute + wire) + 6 * compute)
        elif run["kind"] == "ways alone":
            seconds = (2 + REPEATS * (WAY_STEPS + 1)) * (1 if nodes == NODES else 5) * compute
        else:
            seconds = (steps + WARM_UP) * (compute + wire)
        total += SECONDS["start"][nodes] + seconds
    return total


# --- in the lab ---

def lab(*words: object) -> list[str]:
    return [str(ROOT / "submit" / "lab.sh"), *map(str, words)]


def call(words, timeout=60):
    subprocess.run(words, cwd=ROOT, env=environment(), timeout=timeout, check=True, text=True, stdin=subprocess.DEVNULL,
                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@contextmanager
def nodes_up(count: int = NODES) -> Iterator[None]:
    """The lab, begun anew, and ended whatever happens."""
    os.environ.setdefault("LAB", "experiment")
    subprocess.run(lab("down"), capture_output=True, timeout=60)  # of a study that was killed
    call(lab("up", count))
    try:
        yield
    finally:
        subprocess.run(lab("down"), capture_output=True, timeout=60)


def program_of(run, steps):
    """The words of a run, without where it goes."""
    if "kind" not in run:
        return ["-m", "tools.measuring.slow_link", "--all-reduce", *SIZES, "--repeats", REPEATS]
    if run["kind"].startswith("ways"):
        ways = {"ways": WAYS, "ways alone": WAYS[:1] if run["nodes"] == NODES else ("plain", "batch")}[run["kind"]]
        return ["-m", "tools.measuring.slow_link", "--ways", *ways, "--steps", WAY_STEPS, "--repeats", REPEATS]
    words = [ROOT / run["chapter"] / "main.py", "--device", "cpu", "--dataset", "synthetic", "--batch-size",
             run["batch"], "--max-steps", WARM_UP + steps]
    return [*words, *(["--stage", run["stage"], *PERCEPTRON] if run["stage"] is not None else [])]


def measure(steps, **run):
    """The records of a run. Raises as launch.launch_all() where it fails."""
    call(lab("rate", run["link"]))
    count, words = run["nodes"], list(map(str, [sys.executable, *program_of(run, steps), "--results"]))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.jsonl") for number in range(1, count + 1)]
        if "alone" in run.get("kind", ""):
            alone(words, files)
        else:
            files = files[:1]
            call(lab("run", "-n", count, *words, files[0]), timeout=300)
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    more = {"kind": run["kind"]} if "kind" in run else {}
    if more and "repeat" not in found[0]:
        more["repeat"] = run["repeat"]
    if "alone" in run.get("kind", ""):
        more["at_once"] = count
    return [slim(record) | more | {"link": run["link"]} | machine() for record in found]


def alone(words, files):
    """A rank on each node at the same time, which know nothing of each other."""
    started = []
    for number, file in enumerate(files, 1):
        command = " ".join(["exec", "env", "-C", shlex.quote(str(ROOT)), *map(shlex.quote, [*words, str(file)])])
        started.append(subprocess.Popen(lab("on", f"nid{number}", "bash", "-c", command), cwd=ROOT, env=environment(),
                                        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT))
    try:
        for process in started:
            printed, _ = process.communicate(timeout=200)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, printed)
    finally:
        for process in started:
            process.kill()


def slim(record):
    """Without what chapter 5 counts of memory, which other records have."""
    return {name: value for name, value in record.items() if not name.startswith("memory")}


def listed(runs: list[dict]) -> str:
    """The runs of one repeat after the other, one a line."""
    lines = []
    for names, group in itertools.groupby(runs, lambda run: {**run, "link": ""}):
        links = ", ".join(run["link"] for run in group)
        lines.append(" ".join(f"{names.get(name, '')!s:<{width}}" for name, width in
                              (("repeat", 2), ("kind", 11), ("chapter", 18), ("stage", 5), ("batch", 5), ("nodes", 2)))
                     + links)
    return "\n".join(lines)


def parse_args():
    parser = Parser(__doc__)
    parser.add_argument("--list", action="store_true", help="print the runs, and start none")
    parser.add_argument("--repeats", type=whole, default=REPEATS)
    parser.add_argument("--steps", type=whole, default=STEPS, help=f"timed steps of a run ({STEPS})")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where the records go (assets/records)")
    return parser.parse_args()


def main():
    args = parse_args()
    runs, reduces = plan(args.repeats), plan_of_all_reduces()
    minutes = (bound(runs, args.steps) + bound(reduces, args.steps)) / 60
    said = f"{len(runs)} runs of chapters and {len(reduces)} of all-reduces, about {minutes:.0f} minutes"
    if args.list:
        print(listed(runs), listed(reduces), said, sep="\n")
        return
    files = [args.folder / name for name in ("lab_allreduce.jsonl", "lab.jsonl")]
    if reason := refusal(files[0]):
        sys.exit(f"lab.py: {reason}")
    print(said, file=sys.stderr)
    args.folder.mkdir(parents=True, exist_ok=True)
    with nodes_up():
        for file, group in zip(files, (reduces, runs)):
            study(file, group, lambda **run: measure(args.steps, **run))


if __name__ == "__main__":
    main()
