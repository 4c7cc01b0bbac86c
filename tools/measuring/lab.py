"""Train chapters 2 to 5 on the nodes of submit/lab.sh, over links of chosen speed. Records: lab.jsonl.

And time all-reduces there. Records: lab_allreduce.jsonl.

    python -m tools.measuring.lab                           # 16 minutes; killed, it goes on where it was (same commit)
    python -m tools.measuring.lab --folder /tmp/trial       # elsewhere, from any tree

With nothing else on the machine: the nodes share its cores. A lab of four nodes of the name `experiment` (or LAB) is up
meanwhile. Ranks that are alone run on as many nodes at the same time, and nothing passes between them: the base of all
predictions (lab_model.py). Four ranks on two cores say what crowding does, not what four nodes would do.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch import ROOT, environment, machine, missing, run
from one_line import Parser
from records import RECORDS
from runs import study

LINKS = ("none", "1gbit", "100mbit")
SLOW = LINKS[1:]
CHAPTERS = (("02_horovod/pytorch", None), ("03_ddp", None), ("04_deepspeed", None), ("05_zero", 1), ("05_zero", 3))
CROWDED = (("03_ddp", None), ("05_zero", 1), ("05_zero", 3))  # on four nodes, too
NODES = 4
STEPS, WARM_UP, REPEATS = 5, 5, 3  # workshop.py leaves out the first five
WAY_STEPS = 3  # timed, of each way and repeat
PERCEPTRON = ("--width", 192, "--layers", 2)
SIZES = (4096, 65536, 2**20, 6505768, 25 * 2**20)  # of all-reduces: the fourth is the cnn's gradients
WAYS = ("plain", "fp16", "accumulate", "batch", "bucket", "one")


def batch_of(chapter: str) -> int:
    """Images of a rank in a step: enough that computing takes a tenth of a second."""
    return 1024 if chapter == "05_zero" else 64


def plan() -> list[dict]:
    """The runs, the same ones of a repeat side by side. What is of one repeat comes first."""
    runs = []

    def add(kind, programs, nodes, links, repeat, part=1):
        runs.extend({"kind": kind, "chapter": chapter, "stage": stage, "batch": batch_of(chapter) // part,
                     "nodes": nodes, "link": link, "repeat": repeat}
                    for chapter, stage in programs if not missing(chapter) for link in links)

    for repeat in range(REPEATS):
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
    return [{"kind": "all-reduce", "nodes": nodes, "link": link} for nodes in (2, NODES) for link in LINKS]


# --- in the lab ---

def lab(*words: object) -> list[str]:
    return [str(ROOT / "submit" / "lab.sh"), *map(str, words)]


@contextmanager
def nodes_up(count: int = NODES) -> Iterator[None]:
    """The lab, begun anew, and ended whatever happens."""
    os.environ.setdefault("LAB", "experiment")
    subprocess.run(lab("down"), capture_output=True, timeout=60)  # of a study that was killed
    run(lab("up", count), timeout=60)
    try:
        yield
    finally:
        subprocess.run(lab("down"), capture_output=True, timeout=60)


def program_of(kind, nodes, chapter, stage, batch):
    """The words of a run, without where it goes."""
    slow_link = ["-m", "tools.measuring.slow_link", "--repeats", REPEATS]
    if kind == "all-reduce":
        return [*slow_link, "--all-reduce", *SIZES]
    if kind == "ways":
        return [*slow_link, "--steps", WAY_STEPS, "--ways", *WAYS]
    if kind == "ways alone":
        return [*slow_link, "--steps", WAY_STEPS, "--ways", "plain", *["batch"] * (nodes < NODES)]
    words = [ROOT / chapter / "main.py", "--device", "cpu", "--dataset", "synthetic", "--batch-size", batch,
             "--max-steps", WARM_UP + STEPS]
    return [*words, *(["--stage", stage, *PERCEPTRON] if stage is not None else [])]


def measure(kind, nodes, link, chapter=None, stage=None, batch=None, repeat=None):
    """The records of a run. Raises as launch.run() where it fails."""
    run(lab("rate", link), timeout=60)
    words = list(map(str, [sys.executable, *program_of(kind, nodes, chapter, stage, batch), "--results"]))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.jsonl") for number in range(1, nodes + 1)]
        if "alone" in kind:
            alone(words, files)
        else:
            files = files[:1]
            run(lab("run", "-n", nodes, *words, files[0]), timeout=300)
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    more = {"link": link} | machine()
    if "alone" in kind:
        more["at_once"] = nodes
    if kind != "all-reduce":
        more["kind"] = kind
    return [{"repeat": repeat} | slim(record) | more for record in found]


def alone(words, files):
    """A rank on each node at the same time, which know nothing of each other."""
    started = []
    for number, file in enumerate(files, 1):
        started.append(subprocess.Popen(lab("on", f"nid{number}", *words, file), cwd=ROOT, env=environment(), text=True,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
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


def main():
    parser = Parser(__doc__)
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where the records go (assets/records)")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with nodes_up():
        study(folder / "lab_allreduce.jsonl", plan_of_all_reduces(), measure)
        study(folder / "lab.jsonl", plan(), measure)


if __name__ == "__main__":
    main()
