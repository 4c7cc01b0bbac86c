"""Functions for the steps of set-up: print, run, lock a folder. For Python 3.6 and newer."""

import fcntl
import os
import re
import signal
import subprocess
import threading
import time
from contextlib import suppress


class SetUpFailed(Exception):
    """An error whose text says in one line what is wrong and what to do."""


def step(text):
    print(f"set-up: {text}", flush=True)


def run(command, advice, progress_pattern="$^", log=os.devnull, **options):
    """Run a command; print every seven seconds the elapsed time and the progress.

    progress_pattern: a regex, whose last match in the output is the progress. log: a file for the
    whole output. Raises SetUpFailed with the advice and, without a log, the command's error.
    """
    lines, progress, ended = [], [""], threading.Event()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                               universal_newlines=True, errors="replace", start_new_session=True,
                               **options)

    def report_progress():
        started = time.monotonic()
        while not ended.wait(7):
            step(f"{time.monotonic() - started:.0f} s {progress[-1]}".rstrip())

    threading.Thread(target=report_progress, daemon=True).start()
    try:
        for line in process.stdout:
            lines.append(line)
            progress += re.findall(progress_pattern, line)
        code = process.wait()
    except BaseException:  # such as Ctrl-C: stop the child before the lock is released
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        ended.set()
    with open(log, "w") as file:
        file.writelines(lines)
    if code:
        reason = " ".join("".join(lines[-10:]).split())[-400:]
        raise SetUpFailed(advice if log != os.devnull else f"{reason}: {advice}")


def lock_folder(folder):
    """Lock a folder, waiting until it is free; closing the returned file unlocks it."""
    file = open(folder / ".workshop-lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        step(f"waiting for another set-up in {folder}")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
    return file
