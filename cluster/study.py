"""Do a series of runs that is resumed if it is killed.

    plan = [{"chapter": "03_ddp", "ranks": 2}, {"chapter": "03_ddp", "ranks": 4}]
    run_study(Path("results.jsonl"), plan, run_chapter)
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from tqdm import tqdm

from cluster.launch import ROOT, describe_failure, end_on_sigterm, rank_command, run_job
from cluster.records import append_records, describe_machine, read_records

BUSY = 0.1  # share of the cores: if other programs use more, a measured speed is not to be trusted


@contextmanager
def watch_load() -> Iterator[dict]:
    """Yield a dict that gets `others` when the block, which runs a job, has ended.

    others: the share of this machine's cores that other programs used meanwhile, from 0 to 1. None
    under a batch system, whose daemons start the ranks: these are not this program's children.
    """
    load = {"others": None}
    start, busy, own = time.monotonic(), busy_seconds(), own_seconds()
    yield load
    if not os.environ.keys() & {"SLURM_JOB_ID", "PBS_NODEFILE"}:
        seconds = time.monotonic() - start
        others = busy_seconds() - busy - (own_seconds() - own)
        load["others"] = round(max(0, others / (psutil.cpu_count() * seconds)), 3)


def busy_seconds() -> float:
    """Return the seconds for which this machine's cores have been busy, summed over the cores."""
    times = psutil.cpu_times()._asdict()
    not_busy = "idle", "iowait", "guest", "guest_nice"  # `user` and `nice` include guests
    return sum(seconds for name, seconds in times.items() if name not in not_busy)


def own_seconds() -> float:
    """Return the CPU time of this program and of its ended children, with their children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run_for_records(arguments: list[object], timeout: float = 600, cwd: str | Path = ROOT,
                    env: dict[str, str] | None = None, folder: Path | None = None) -> list[dict]:
    """Run a command with --results FILE; return its records, with describe_machine() and others.

    folder: for FILE, if not the system's for temporary files. Raises subprocess.SubprocessError.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        results = Path(temporary, "results.jsonl")
        with watch_load() as load:
            output = run_job([*arguments, "--results", results], timeout, cwd, env)
        records = read_records(results)
    if not records:
        raise subprocess.SubprocessError("\n".join(["no record", *output.splitlines()[-10:]]))
    return [record | describe_machine() | load for record in records]


def run_chapter(chapter: str, ranks: int, *flags: object) -> dict:
    """Run a chapter and return its record, as run_for_records() does."""
    record, = run_for_records(rank_command(chapter, ranks, *flags))
    return record


def find_records(path: str | Path, planned: dict) -> list[dict]:
    """Return a file's records that have a planned run's names and values."""
    return [record for record in read_records(path)
            if all(record.get(name) == value for name, value in planned.items())]


def run_unless_recorded(path: str | Path, planned: dict,
                        measure: Callable[..., dict | list[dict]]) -> list[dict]:
    """Return a planned run's records from the file; without any, append measure(**planned)."""
    records = find_records(path, planned)
    if not records:
        result = measure(**planned)
        results = result if isinstance(result, list) else [result]
        records = [{**planned, **record, **planned} for record in results]  # planned keys first
        append_records(path, *records)
    return records


def run_study(path: str | Path, plan: Iterable[dict], measure: Callable[..., dict | list[dict]],
              show: Callable[[dict], None] = lambda record: None) -> list[dict]:
    """Do the planned runs in turn by measure(**run), and write all their records to `path`.

    Until the last run has ended, the records are in {path}.part; a study that was killed or failed
    resumes from this file. show(record) is called for each record.
    """
    end_on_sigterm()
    part = Path(f"{path}.part")
    machine = describe_machine()
    if any(record.get(name, machine[name]) != machine[name] for record in read_records(part)
           for name in ("git", "host")):
        print(f"discarded {part}: from another commit or another machine", file=sys.stderr)
        part.unlink()
    advice = f"completed runs are in {os.path.relpath(part)}; run the same command to resume"
    records, name = [], ""
    try:
        for planned in tqdm(plan, unit="run", disable=None, leave=False):
            name = ", ".join(str(value) for value in planned.values() if value)
            for record in run_unless_recorded(part, planned, measure):
                records.append(record)
                show(record)
    except KeyboardInterrupt:
        sys.exit(f"interrupted; {advice}")
    except (subprocess.SubprocessError, OSError) as problem:
        sys.exit(f"{name}: {describe_failure(problem)}\n{advice}")
    part.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(part, path)
    return records
