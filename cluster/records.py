"""Read and append records: lines of JSON with what a program measured, where, and its commit."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path

from cluster.launch import ROOT

RECORDS, FIGURES = ROOT / "assets" / "records", ROOT / "assets" / "figures"
LIBRARIES = ("torch", "tensorflow-cpu", "tensorflow", "horovod", "deepspeed")


def read_records(path: str | Path) -> list[dict]:
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


def append_records(path: str | Path, *records: dict) -> None:
    """Append records as lines, after ending an incomplete last line, and flush them to disk."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        start = b"" if not file.tell() or file.read(1) == b"\n" else b"\n"
        file.write(start + b"".join(json.dumps(record).encode() + b"\n" for record in records))
        file.flush()
        os.fsync(file.fileno())


def processor_name() -> str:
    """Return the names of the GPUs, or of the CPU if there are none."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        nvidia_smi = subprocess.run(query, capture_output=True, text=True)
        if nvidia_smi.returncode == 0 and nvidia_smi.stdout.strip():  # it fails without a driver
            return ", ".join(nvidia_smi.stdout.splitlines())
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return name[1] if name else platform.processor()


def usable_cores() -> int:
    """Return the number of cores that this process may use; macOS does not restrict it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def git_commit() -> str:
    """Return the commit of this tree, as 4cf4026 or 4cf4026-dirty; or "unknown"."""
    if not shutil.which("git") or not (ROOT / ".git").exists():  # git would search parent folders
        return "unknown"
    describe = ["git", "--no-optional-locks", "-C", ROOT, "describe", "--always", "--dirty"]
    return subprocess.run(describe, capture_output=True, text=True).stdout.strip() or "unknown"


def describe_machine() -> dict:
    """Return rank_command()'s launcher, host, processor, versions, commit and time."""
    versions = {library.name: library.version for library in distributions()
                if library.name in LIBRARIES}
    now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017  for Python before 3.11
    return {"launcher": "python or mpiexec (MPICH)", "host": platform.node(),
            "processor": processor_name(), "cpus": usable_cores(),
            "python": platform.python_version(), **versions, "git": git_commit(),
            "time": now.isoformat(timespec="seconds")}
