#!/usr/bin/env python3
"""A stand-in for mpiexec where there is none: it shows what the notebooks' commands printed where ranks could start.

    python -m tools.notebooks.recorded_ranks    # runs the commands, and writes their record
    recorded_ranks.py -n 2 python three_ways.py --results FILE    # prints the record, and writes the file

ready.needs() puts it on the path as mpiexec. On a Cray's login node, for one, no ranks can be started.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "assets" / "records" / "recorded_ranks.jsonl"
COMMANDS = [  # folder, words of mpiexec; average.py is written by its notebook
    ("02_horovod", "-l -n 2 python average.py 32"),
    ("02_horovod", "-l -n 2 python average.py 40"),
    ("02_horovod", "-n 8 python pytorch/ring_allreduce.py --sizes 32000 --repeats 3"),
    ("03_ddp", "-n 2 python three_ways.py"),
    ("03_ddp", "-n 2 python three_ways.py --batch-size 128"),
    ("03_ddp", "-n 4 python three_ways.py pipeline gpipe --micro-batches 8"),
    ("05_zero", "-n 2 python main.py --device cpu --stage 3 --precision bf16 --width 256 --layers 8 --max-steps 2"),
]


def run(folder: str, words: str) -> dict:
    """Start the ranks of a command. Returns what they printed, and the lines of the results file where it has one."""
    import os
    import subprocess
    import tempfile

    from launch import environment, machine

    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary, "results")
        flags = [] if "average" in words or "ring" in words else ["--results", str(results)]
        path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(["mpiexec", *words.split(), *flags], cwd=ROOT / folder, check=True, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment() | path)
        lines = results.read_text().splitlines() if flags else []
    return machine() | {"words": words, "text": done.stdout, "results": [json.loads(line) for line in lines]}


def show(words: list[str]) -> int:
    """Print the record of a command, and write its results file. Returns the exit code: 1 where there is no record."""
    results = words[words.index("--results") + 1] if "--results" in words else None
    known = [word for place, word in enumerate(words) if word != "--results" and words[place - 1] != "--results"]
    records = [json.loads(line) for line in RECORD.read_text().splitlines()]
    record = next((record for record in records if record["words"].split() == known), None)
    if record is None:
        print("There is no mpiexec here, and no record of this command: it needs a machine that starts ranks.")
        return 1
    print(f"There is no mpiexec here. Recorded on {record['processor']}:", record["text"], sep="\n", end="")
    if results:
        Path(results).write_text("".join(json.dumps(line) + "\n" for line in record["results"]))
    return 0


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(show(sys.argv[1:]))
    from runs import study
    study(RECORD, [{"folder": folder, "words": words} for folder, words in COMMANDS], run)
