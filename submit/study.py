"""Start ranks, do a series of runs that resumes where it was killed, append records and read them.

    from study import command, read, records_of, start, study

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
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "assets"
RECORDS, FIGURES = ASSETS / "records", ASSETS / "figures"
LIBRARIES = ("torch", "tensorflow-cpu", "tensorflow", "horovod", "deepspeed")


# Records

def read(path: str | Path) -> list[dict]:
    """Return the records of a file; a name without a folder is one of assets/records.

    Skips a line that a killed program left unfinished. A file that does not exist has no records.
    """
    path = RECORDS / path if isinstance(path, str) and "/" not in path else Path(path)
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
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
    """Return a command's words: python for one rank, this environment's mpiexec for more.

    The chapter is a folder with a main.py, or another program, as its record names it.
    """
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


def end(process: subprocess.Popen) -> None:
    """End a run and all its ranks."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    except ProcessLookupError:  # ended just now
        process.wait()


def run(words: list[object], timeout: float = 600, cwd: str | Path = ROOT,
        env: dict[str, str] | None = None) -> str:
    """Run a command in the top folder, with one thread per rank; return what it printed.

    Raises subprocess.CalledProcessError, whose `output` is what it printed, or TimeoutExpired. No
    rank outlives this.
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


# A series of runs

def planned_records(path: str | Path, planned: dict) -> list[dict]:
    """Return a file's records of a planned run: those with its names and values, unless failed."""
    return [record for record in read(path) if "failed" not in record
            and all(record.get(name) == value for name, value in planned.items())]


def once(path: str | Path, planned: dict, do: Callable[..., dict | list[dict]]) -> list[dict]:
    """Return the file's records of a planned run; if there are none, do(**planned) and append.

    A record gets the plan's names and values, which tell its run from others. A record with a
    reason under "failed" stays, and its run is done again next time.
    """
    records = planned_records(path, planned)
    if not records:
        result = do(**planned)
        results = result if isinstance(result, list) else [result]
        records = [{**planned, **record, **planned} for record in results]
        append(path, *records)
    return records


def study(path: str | Path, plan: list[dict], do: Callable[..., dict | list[dict]]) -> list[dict]:
    """Do the planned runs in turn, each by do(**run), and write all their records into the file.

    Until the last run has ended they are in the file's name with .part appended: a killed study
    resumes from there. A run that fails ends the program, with what it printed last.
    """
    from tqdm import tqdm  # check_script.py runs without it

    end_on_sigterm()
    part = Path(f"{path}.part")
    discard_stale(part)
    records = []
    with tqdm(plan, unit="run", disable=None) as bar:
        for planned in bar:
            name = ", ".join(str(value) for value in planned.values() if value != "")
            bar.set_description(name)
            try:
                records += once(part, planned, do)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
                bar.close()
                sys.exit(f"{name}: {last_words(problem)}")
    publish(part, path, records)
    return records


def publish(part: str | Path, path: str | Path, records: list[dict]) -> None:
    """Write the records of a finished series, and no unfinished line, into the file at once."""
    Path(part).write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(part, path)


def discard_stale(part: Path) -> None:
    """Discard partial results from another commit or another machine."""
    records = read(part)
    if not records:
        return
    here = machine()
    if any(record.get(name, here[name]) != here[name] for record in records
           for name in ("git", "host")):
        print(f"discarded {part}: from another commit or another machine", file=sys.stderr)
        part.unlink()
    else:
        print(f"{len(records)} records are in {part} already", file=sys.stderr)


def end_on_sigterm() -> None:
    """Have SIGTERM end the run that is under way, too, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def last_words(problem: subprocess.CalledProcessError | subprocess.TimeoutExpired) -> str:
    """Return why a run failed: its exit code and the last lines that it printed."""
    if isinstance(problem, subprocess.TimeoutExpired):
        return f"no end after {problem.timeout} s"
    return "\n".join([f"exit code {problem.returncode}", *problem.output.splitlines()[-10:]])


# Flags

class Parser(argparse.ArgumentParser):
    """argparse's, which tells a mistake in one line of exit code 2; --help has the usage."""

    def __init__(self, doc: str, **options: object):
        super().__init__(description=doc.splitlines()[0], allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}\n")


def whole(text: str) -> int:
    """Return a flag's whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
