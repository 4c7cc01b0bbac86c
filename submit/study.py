"""Start ranks, do a series of runs that resumes where it was killed, append and read records.

    start("03_ddp", 2, "--epochs", 1)["images_per_second"]
    study(RECORDS / "zero.jsonl", [{"chapter": "05_zero", "ranks": 2}, ...], start)

A record is one line of JSON: what a program measured, the machine that it ran on, and the commit.
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
    """Return the whole records of a file; a name without a folder is one of assets/records."""
    path = RECORDS / path if isinstance(path, str) and "/" not in path else Path(path)
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:  # a killed program left it unfinished
            continue
    return [record for record in records if isinstance(record, dict)]


def append(path: str | Path, *records: dict) -> None:
    """Append whole lines, which are on disk when this returns; close a broken last line first."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        start = b"" if not file.tell() or file.read(1) == b"\n" else b"\n"
        file.write(start + b"".join(json.dumps(record).encode() + b"\n" for record in records))
        file.flush()
        os.fsync(file.fileno())


def processor() -> str:
    """Return the names of the GPUs where there are any, else of the CPU."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
        return ", ".join(names)
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return name[1] if name else platform.processor()


def commit() -> str:
    """Return the commit of this tree, as 4cf4026 or 4cf4026-dirty; else "unknown"."""
    if not shutil.which("git") or not (ROOT / ".git").exists():  # git would take a repository above
        return "unknown"
    words = ["git", "--no-optional-locks", "-C", ROOT, "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unknown"


def machine() -> dict:
    """Return where, when and with which versions a run happens."""
    versions = {library.name: library.version for library in distributions()
                if library.name in LIBRARIES}
    now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017  for Python before 3.11
    return {"launcher": "python or mpiexec (MPICH)", "host": platform.node(),
            "processor": processor(), "cpus": os.cpu_count(),
            "python": platform.python_version(), **versions, "git": commit(),
            "time": now.isoformat(timespec="seconds")}


# Ranks

def command(chapter: str, ranks: int, *flags: object) -> list[str]:
    """Return the words that start a chapter, or another program: with mpiexec for several ranks."""
    program = ROOT / chapter if chapter.endswith(".py") else ROOT / chapter / "main.py"
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    launcher = [mpiexec, "-n", str(ranks)] if ranks > 1 else []
    return [*launcher, sys.executable, str(program), *map(str, flags)]


def missing(chapter: str) -> str | None:
    """Return why this environment cannot run a chapter, as set-up noted it; None if it can."""
    reason = Path(sys.prefix, "without-horovod")
    return reason.read_text() if chapter.startswith("02_horovod") and reason.exists() else None


def environment() -> dict[str, str]:
    """Return the variables of ranks that share the cores: one thread per rank."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def run(words: list[object], timeout: float = 600, cwd: str | Path = ROOT,
        env: dict[str, str] | None = None) -> str:
    """Run a command; return what it printed. No rank outlives this.

    Raises subprocess.CalledProcessError, whose `output` is what it printed, or TimeoutExpired.
    """
    words = list(map(str, words))
    process = subprocess.Popen(
        words, cwd=cwd, env=env or environment(), text=True, errors="replace",
        stdin=subprocess.DEVNULL,  # mpiexec would read what is not for it
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        printed, _ = process.communicate(timeout=timeout)
    except BaseException:  # the time-out, Ctrl-C, the end of the job
        end(process)
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words, printed)
    return printed


def end(process: subprocess.Popen) -> None:
    """End a run and all its ranks: those that do not heed SIGTERM within ten seconds by SIGKILL."""
    for number in signal.SIGTERM, signal.SIGKILL:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(10)


def records_of(words: list[object], timeout: float = 600) -> list[dict]:
    """Run a command that takes --results FILE; return its records, with machine(), as dicts."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        run([*words, "--results", results], timeout)
        return [record | machine() for record in read(results)]


def start(chapter: str, ranks: int, *flags: object) -> dict:
    """Run a chapter on so many ranks; return its record with machine(); raise as run()."""
    record, = records_of(command(chapter, ranks, *flags))
    return record


def last_words(problem: Exception) -> str:
    """Return why a run failed: its exit code and the last lines that it printed."""
    if isinstance(problem, subprocess.CalledProcessError):
        return "\n".join([f"exit code {problem.returncode}", *problem.output.splitlines()[-10:]])
    if isinstance(problem, subprocess.TimeoutExpired):
        return f"no end after {problem.timeout} s"
    return str(problem)


# A series of runs

def planned_records(path: str | Path, planned: dict) -> list[dict]:
    """Return a file's records of a planned run: those with its names and values, unless failed."""
    return [record for record in read(path) if "failed" not in record
            and all(record.get(name) == value for name, value in planned.items())]


def once(path: str | Path, planned: dict, do: Callable[..., dict | list[dict]]) -> list[dict]:
    """Return the file's records of a planned run; if there are none, do(**planned) and append."""
    records = planned_records(path, planned)
    if not records:
        result = do(**planned)
        results = result if isinstance(result, list) else [result]
        records = [{**planned, **record, **planned} for record in results]
        append(path, *records)
    return records


def study(path: str | Path, plan: Iterable[dict], do: Callable[..., dict | list[dict]],
          show: Callable[[dict], None] = lambda record: None) -> list[dict]:
    """Do the planned runs in turn, each by do(**run), and write all their records into the file.

    Until the last has ended, the records are in the file's name with .part appended, and a study
    that was killed or failed resumes there. show(record) is called when there is a record.
    """
    from tqdm import tqdm  # check_script.py runs without it

    end_on_sigterm()
    part = Path(f"{path}.part")
    here = machine()
    if any(record.get(name, here[name]) != here[name] for record in read(part)
           for name in ("git", "host")):
        print(f"discarded {part}: from another commit or another machine", file=sys.stderr)
        part.unlink()
    stays = f"what was measured stays in {os.path.relpath(part)}, and the same command goes on"
    records, name = [], ""
    try:
        for planned in tqdm(plan, unit="run", disable=None, leave=False):
            name = ", ".join(str(value) for value in planned.values() if value)
            for record in once(part, planned, do):
                records.append(record)
                show(record)
    except KeyboardInterrupt:
        sys.exit(f"interrupted; {stays}")
    except (subprocess.SubprocessError, OSError) as problem:
        sys.exit(f"{name}: {last_words(problem)}\n{stays}")
    part.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(part, path)
    return records


def end_on_sigterm() -> None:
    """Have SIGTERM end the run that is under way, too, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


# Flags

class Parser(argparse.ArgumentParser):
    """argparse's, which tells a mistake in one line of exit code 2; --help has the usage."""

    def __init__(self, doc: str, **options: object):
        super().__init__(description=doc.splitlines()[0], allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}\n")
