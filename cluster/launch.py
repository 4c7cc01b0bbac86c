"""Start ranks on this machine, and leave none behind.

    print(run_job(rank_command("03_ddp", 2, "--epochs", 1)))      # mpiexec -n 2 python main.py ...

A job is a command with all processes that it starts, such as the ranks of an mpiexec.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def rank_command(program: str | Path, ranks: int, *flags: object) -> list[str]:
    """Return the command that starts a program on `ranks` ranks; several need a launcher.

    program: a chapter's folder, a file, or a module to be started in the top folder.
    """
    path = ROOT / program
    if path.is_dir():
        path = path / "main.py"
    target = [path] if path.suffix == ".py" else ["-m", program]
    launcher = [sys.executable]
    if ranks > 1:
        launcher = [Path(sys.executable).parent / "mpiexec", "-n", ranks, sys.executable]
    return [str(word) for word in (*launcher, *target, *flags)]


def rank_environment() -> dict[str, str]:
    """Return environment variables for ranks that share the cores: one thread per rank."""
    return os.environ | {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1",
                         "TF_NUM_INTEROP_THREADS": "1"}


def install_problem(chapter: str) -> str | None:
    """Return why this environment cannot run a chapter, as set-up recorded it, or None."""
    file = Path(sys.prefix, "without-horovod")
    return file.read_text() if chapter.startswith("02_horovod") and file.exists() else None


def start_job(arguments: list[object], cwd: str | Path | None = ROOT,
              env: dict[str, str] | None = None, stderr: int = subprocess.STDOUT
              ) -> subprocess.Popen:
    """Start a command in a session of its own; finish_job() reads its output."""
    return subprocess.Popen(
        [str(word) for word in arguments], cwd=cwd, env=env or rank_environment(), text=True,
        errors="replace", stdin=subprocess.DEVNULL,  # mpiexec would read this program's input
        stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)


def finish_job(process: subprocess.Popen, timeout: float = 600) -> subprocess.CompletedProcess:
    """Wait for a job; end all its ranks after the time-out, or if this program is interrupted."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException as problem:  # the time-out, Ctrl-C, end_on_sigterm()
        end_job(process)
        if isinstance(problem, subprocess.TimeoutExpired):
            with suppress(subprocess.TimeoutExpired):
                problem.output = process.communicate(timeout=2)[0]
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def end_job(process: subprocess.Popen) -> None:
    """Terminate a job and all its ranks: SIGTERM, and after ten seconds SIGKILL."""
    for signal_number in signal.SIGTERM, signal.SIGKILL:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal_number)
            process.wait(10)


def run_job(arguments: list[object], timeout: float = 600, cwd: str | Path = ROOT,
            env: dict[str, str] | None = None) -> str:
    """Run a command and return its output.

    Raises subprocess.CalledProcessError, with its `output`, or TimeoutExpired.
    """
    job = finish_job(start_job(arguments, cwd, env), timeout)
    job.check_returncode()
    return job.stdout


def describe_failure(problem: Exception) -> str:
    """Return why a job failed, with the last lines of its output."""
    output = getattr(problem, "output", None)
    lines = output.splitlines() if isinstance(output, str) else []
    return "\n".join([str(problem), *lines[-10:]])


def end_on_sigterm() -> None:
    """Exit on SIGTERM with an exception, so that finish_job() ends the ranks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
