"""The runs of a study: each is recorded as one whole line when it ends, so that a killed study goes on where it was.

    records = study("assets/records/zero.jsonl", [{"chapter": "05_zero", "ranks": 2}, ...], launch)

Until all are done they are in that name with .part behind it. What is there of other code, another commit or another
machine is not gone on with.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from launch import ROOT, machine
from records import clean, refusal
from tqdm import tqdm

SAME = ("git", "host", "processor", "cpus", "torch")  # of the runs of one study


def read(path: Path) -> list[dict]:
    """The records of a file, as dicts; a line that a killed study left unfinished is passed over."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in records if isinstance(record, dict)]


def append(path: Path, record: dict) -> None:
    """One whole line, on disk when this returns; a broken last line is closed first."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        start = b"" if not file.tell() or file.read(1) == b"\n" else b"\n"
        file.write(start + json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def end_with_the_study() -> None:
    """Have SIGTERM end the run that is under way, too: what waits for it is unwound."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def code():
    """SHA-256 of what a study runs: a commit does not tell one dirty tree from another."""
    paths = [path for room in ("[0-9]*", "reading_data", "submit", "tools") for path in ROOT.glob(f"{room}/**/*")
             if path.suffix in (".py", ".sh", ".json", ".slurm", ".pbs")]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(paths))).hexdigest()


class Runs:
    """The runs of one study, in a file of their own: a line has what was run, with what, and what came of it."""

    def __init__(self, path):
        found = machine()
        self.path, self.here, self.results = Path(path), {name: found.get(name) for name in SAME}, []
        self.here["code"] = None if clean(self.here["git"]) else code()
        lines = read(self.path)
        if any(line["here"] != self.here for line in lines):
            print(f"{self.path} is of other code or another machine: begun again", file=sys.stderr)
            self.path.unlink()
            lines = []
        self.done = {json.dumps(line["run"]): line["result"] for line in lines}
        if self.done:
            print(f"{len(self.done)} runs are in {self.path} already", file=sys.stderr)

    def has(self, run):
        """Whether this run has been done."""
        return json.dumps(run) in self.done

    def once(self, run, do):
        """What do() returned for this run (a dict that tells it from the others), now or before: JSON."""
        key = json.dumps(run)
        if key not in self.done:
            self.done[key] = do()
            append(self.path, {"run": run, "here": self.here, "result": self.done[key]})
        self.results.append(self.done[key])
        return self.done[key]

    def records(self):
        """What the runs returned, one record or several each, in one list."""
        return [record for result in self.results for record in (result if isinstance(result, list) else [result])]

    def publish(self, path, keep=False):
        """Put all records into a file, a line each, at once, and forget the runs, unless kept. Returns the records."""
        records = self.records()
        whole = self.path.with_suffix(".whole")
        whole.write_text("".join(json.dumps(record) + "\n" for record in records))
        os.replace(whole, path)
        if not keep:
            self.path.unlink(missing_ok=True)
        return records


def study(path: str | Path, plan: list[dict], do: Callable[..., dict | list[dict]],
          check: Callable[[list[dict]], None] = lambda records: None) -> list[dict]:
    """Do the runs of a plan, dicts that differ, in its order, each by do(**run), which returns its record, or several.

    Writes the records into the file when all are there and check(records) has not raised, and returns them. Where a run
    fails, what it printed ends the program; one line does where the file may not be written (records.refusal).
    """
    if reason := refusal(path):
        sys.exit(f"{Path(sys.argv[0]).name}: {reason}")
    end_with_the_study()
    runs = Runs(f"{path}.part")
    with tqdm(plan, unit="run", disable=None) as bar:
        for run in bar:
            name = ", ".join(str(value) for value in run.values() if value != "")
            bar.set_description(name)
            try:
                runs.once(run, lambda run=run: do(**run))
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
                bar.close()
                sys.exit(f"{name}: {said(problem)}")
    check(runs.records())
    return runs.publish(path)


def said(problem: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    """What a run that failed or took too long printed last."""
    if isinstance(problem, subprocess.TimeoutExpired):
        return f"no end after {problem.timeout} s"
    return f"exit code {problem.returncode}\n" + "\n".join(problem.stdout.splitlines()[-10:])
