"""Start ranks, do a series of runs that can be resumed, append and read records.

    start("03_ddp", 2, "--epochs", 1)["images_per_second"]
    study(RECORDS / "zero.jsonl", [{"chapter": "05_zero", "ranks": 2}, ...], start)

A record is a line of JSON: what a program measured, its machine, and the commit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "assets"
RECORDS, FIGURES = ASSETS / "records", ASSETS / "figures"
LIBRARIES = ("torch", "tensorflow-cpu", "tensorflow", "horovod", "deepspeed")


# Records

def read(path: str | Path) -> list[dict]:
    """Return a file's complete records; a name without a folder is one in assets/records."""
    path = RECORDS / path if isinstance(path, str) and "/" not in path else Path(path)
    records = []
    if not path.exists():
        return records
    for line in path.read_bytes().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:  # an incomplete line of a program that was killed
            continue
    return [record for record in records if isinstance(record, dict)]


def append(path: str | Path, *records: dict) -> None:
    """Append records as lines, after ending an incomplete last line, and flush them to disk."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        start = b"" if not file.tell() or file.read(1) == b"\n" else b"\n"
        file.write(start + b"".join(json.dumps(record).encode() + b"\n" for record in records))
        file.flush()
        os.fsync(file.fileno())


def processor() -> str:
    """Return the names of the GPUs, or of the CPU if there are none."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
        return ", ".join(names)
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return name[1] if name else platform.processor()


def commit() -> str:
    """Return the commit of this tree, as 4cf4026 or 4cf4026-dirty; or "unknown"."""
    if not shutil.which("git") or not (ROOT / ".git").exists():  # git would search parent folders
        return "unknown"
    describe = ["git", "--no-optional-locks", "-C", ROOT, "describe", "--always", "--dirty"]
    return subprocess.run(describe, capture_output=True, text=True).stdout.strip() or "unknown"


def machine() -> dict:
    """Return command()'s launcher, host, processor, versions, commit and time, for a record."""
    versions = {library.name: library.version for library in distributions()
                if library.name in LIBRARIES}
    now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017  for Python before 3.11
    return {"launcher": "python or mpiexec (MPICH)", "host": platform.node(),
            "processor": processor(), "cpus": os.cpu_count(),
            "python": platform.python_version(), **versions, "git": commit(),
            "time": now.isoformat(timespec="seconds")}


# Ranks

def command(chapter: str, ranks: int, *flags: object) -> list[str]:
    """Return the command that starts a chapter or a program, with mpiexec for several ranks."""
    program = ROOT / chapter if chapter.endswith(".py") else ROOT / chapter / "main.py"
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    launcher = [mpiexec, "-n", str(ranks)] if ranks > 1 else []
    return [*launcher, sys.executable, str(program), *map(str, flags)]


def missing(chapter: str) -> str | None:
    """Return why this environment cannot run a chapter, as set-up recorded it, or None."""
    file = Path(sys.prefix, "without-horovod")
    return file.read_text() if chapter.startswith("02_horovod") and file.exists() else None


def environment() -> dict[str, str]:
    """Return environment variables for ranks that share the cores: one thread per rank."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def run(arguments: list[object], timeout: float = 600, cwd: str | Path = ROOT,
        env: dict[str, str] | None = None) -> str:
    """Run a command and return its output; end all its ranks if interrupted.

    Raises subprocess.CalledProcessError, with its `output`, or TimeoutExpired.
    """
    arguments = list(map(str, arguments))
    process = subprocess.Popen(
        arguments, cwd=cwd, env=env or environment(), text=True, errors="replace",
        stdin=subprocess.DEVNULL,  # mpiexec would read this program's input
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException:  # the time-out, Ctrl-C, the end of the job
        end(process)
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments, output)
    return output


def end(process: subprocess.Popen) -> None:
    """Terminate a run and all its ranks: SIGTERM, and after ten seconds SIGKILL."""
    for signal_number in signal.SIGTERM, signal.SIGKILL:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal_number)
            process.wait(10)


def records_of(arguments: list[object], timeout: float = 600) -> list[dict]:
    """Run a command with --results FILE; return its records, with machine() added."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        run([*arguments, "--results", results], timeout)
        return [record | machine() for record in read(results)]


def start(chapter: str, ranks: int, *flags: object) -> dict:
    """Run a chapter on `ranks` ranks; return its record with machine(). Raises as run() does."""
    record, = records_of(command(chapter, ranks, *flags))
    return record


def describe_failure(problem: Exception) -> str:
    """Return why a run failed, with its exit code and the last lines of its output."""
    if isinstance(problem, subprocess.CalledProcessError):
        return "\n".join([f"exit code {problem.returncode}", *problem.output.splitlines()[-10:]])
    if isinstance(problem, subprocess.TimeoutExpired):
        return f"timed out after {problem.timeout} s"
    return str(problem)


# A series of runs

def planned_records(path: str | Path, planned: dict) -> list[dict]:
    """Return a file's records that have a planned run's names and values, unless it failed."""
    return [record for record in read(path) if "failed" not in record
            and all(record.get(name) == value for name, value in planned.items())]


def once(path: str | Path, planned: dict, do: Callable[..., dict | list[dict]]) -> list[dict]:
    """Return a planned run's records from the file; if there are none, do(**planned) and append."""
    records = planned_records(path, planned)
    if not records:
        result = do(**planned)
        results = result if isinstance(result, list) else [result]
        records = [{**planned, **record, **planned} for record in results]  # planned keys first
        append(path, *records)
    return records


def study(path: str | Path, plan: Iterable[dict], do: Callable[..., dict | list[dict]],
          show: Callable[[dict], None] = lambda record: None) -> list[dict]:
    """Do the planned runs in turn, each with do(**run), and write all their records to `path`.

    Until the last run has ended, the records are in {path}.part; a study that was killed or failed
    resumes from this file. show(record) is called for each record.
    """
    from tqdm import tqdm  # check_script.py must run without tqdm

    end_on_sigterm()
    part = Path(f"{path}.part")
    this = machine()
    if any(record.get(name, this[name]) != this[name] for record in read(part)
           for name in ("git", "host")):
        print(f"discarded {part}: from another commit or another machine", file=sys.stderr)
        part.unlink()
    advice = f"completed runs are in {os.path.relpath(part)}; run the same command to resume"
    records, name = [], ""
    try:
        for planned in tqdm(plan, unit="run", disable=None, leave=False):
            name = ", ".join(str(value) for value in planned.values() if value)
            for record in once(part, planned, do):
                records.append(record)
                show(record)
    except KeyboardInterrupt:
        sys.exit(f"interrupted; {advice}")
    except (subprocess.SubprocessError, OSError) as problem:
        sys.exit(f"{name}: {describe_failure(problem)}\n{advice}")
    part.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(part, path)
    return records


def end_on_sigterm() -> None:
    """Exit on SIGTERM with an exception, so that run() ends its ranks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


# Flags

class Parser(argparse.ArgumentParser):
    """ArgumentParser that reports an error in one line, with exit code 2."""

    def __init__(self, doc: str, **options: object):
        super().__init__(description=doc.splitlines()[0], allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}\n")
