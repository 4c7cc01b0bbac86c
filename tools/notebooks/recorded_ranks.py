#!/usr/bin/env python3
"""A replacement for a missing mpiexec that shows the recorded output of the notebooks' commands.

    python -m tools.notebooks.recorded_ranks    # runs all commands and records them
    recorded_ranks.py -n 2 python three_ways.py --results FILE    # shows a record and writes FILE

ready.py puts this file on PATH as mpiexec where no ranks can start, as on a Cray login node.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "assets" / "records" / "recorded_ranks.jsonl"
COMMANDS = [  # folder, arguments of mpiexec; a notebook writes average.py
    ("02_horovod", "-l -n 2 python average.py 32"),
    ("02_horovod", "-l -n 2 python average.py 40"),
    ("02_horovod", "-n 8 python ring_allreduce.py --sizes 32000 --repeats 3"),
    ("03_ddp", "-n 2 python three_ways.py"),
    ("03_ddp", "-n 2 python three_ways.py --batch-size 128"),
    ("03_ddp", "-n 4 python three_ways.py pipeline gpipe --micro-batches 8"),
    ("05_zero", "-n 2 python main.py --device cpu --stage 3 --precision bf16 --width 256 "
                "--layers 8 --max-steps 2"),
]


def record(folder: str, arguments: str) -> dict:
    """Run mpiexec; return its output and the records of its results file."""
    import tempfile

    from submit.study import machine, read, run

    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary, "results")
        flags = [] if re.search("average|ring", arguments) else ["--results", results]
        mpiexec = Path(sys.executable).parent / "mpiexec"
        text = run([mpiexec, *arguments.split(), *flags], cwd=ROOT / folder)
        return machine() | {"text": text, "results": read(results)}


def show(arguments: list[str]) -> int:
    """Print the record of a command and write its results file; return the exit code."""
    results = None
    if "--results" in arguments:
        index = arguments.index("--results")
        results = Path(arguments[index + 1])
        arguments = arguments[:index] + arguments[index + 2:]
    for line in RECORD.read_text().splitlines():
        command = json.loads(line)
        if command["arguments"].split() == arguments:
            print(f"mpiexec not found. Recorded on {command['processor']}:")
            print(command["text"], end="")
            if results:
                results.write_text("".join(json.dumps(row) + "\n" for row in command["results"]))
            return 0
    print("mpiexec not found, and this command has no record: run it on a machine that can start "
          "ranks.")
    return 1


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(show(sys.argv[1:]))
    from submit.study import study
    plan = [{"folder": folder, "arguments": arguments} for folder, arguments in COMMANDS]
    study(RECORD, plan, record)
