"""Start a chapter's main.py on this machine; return the record that it wrote, with what can be looked up added.

    launch("03_ddp", 2, "--epochs", 1)["images_per_second"]
"""

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

from records import ROOT, commit


def command(chapter: str, ranks: int, *flags: object) -> list[str]:
    """The words of the command: plain python for one rank, this environment's mpiexec for more.

    The chapter is a folder with a main.py, or another file, as its record names it.
    """
    mpiexec = [] if ranks == 1 else [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)]
    main = ROOT / chapter if chapter.endswith(".py") else ROOT / chapter / "main.py"
    return [*mpiexec, sys.executable, str(main), *map(str, flags)]


def missing(chapter: str) -> str | None:
    """Why this environment cannot run a chapter, as set-up noted it; None if it can."""
    reason = Path(sys.prefix, "without-horovod")
    return reason.read_text() if chapter.startswith("02_horovod") and reason.exists() else None


def environment() -> dict[str, str]:
    """One thread a rank: the ranks share the cores, and one rank is compared with several."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def processor() -> str:
    """The names of the GPUs where there are any, else of the CPU."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return ", ".join(subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[:-1])
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor()


def machine() -> dict:
    """Where and with what a run happened, as far as that can be looked up."""
    versions = {found.name: found.version for found in distributions()
                if found.name in ("torch", "tensorflow-cpu", "tensorflow", "horovod", "deepspeed")}
    return {"launcher": "python or mpiexec (MPICH)", "host": platform.node(), "processor": processor(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(), **versions, "git": commit(),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}


def run(words: list[object], timeout: float = 600) -> str:
    """Run a command in the top folder, one thread a rank. Returns what it printed, its errors included.

    Raises subprocess.CalledProcessError, which has that, too, where it fails, and subprocess.TimeoutExpired.
    """
    return subprocess.run(list(map(str, words)), cwd=ROOT, env=environment(), timeout=timeout, check=True, text=True,
                          stdin=subprocess.DEVNULL,  # mpiexec would read what is not for it
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def records_of(words: list[object], timeout: float = 600) -> list[dict]:
    """Run a command that takes --results FILE. Returns the records that it wrote, as dicts; raises as run()."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        run([*words, "--results", results], timeout)
        return [json.loads(line) | machine() for line in results.read_text().splitlines()]


def launch(chapter: str, ranks: int, *flags: object) -> dict:
    """Run chapter/main.py on so many ranks with these flags. Returns its record as a dict; raises as run()."""
    record, = records_of(command(chapter, ranks, *flags))
    return record
