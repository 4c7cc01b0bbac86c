"""What set-up prints, runs and waits for. Any Python from 3.6 on reads it."""

import fcntl
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TextIO


class SetUpFailed(Exception):
    """The text says in one line what is wrong and what to do."""


def step(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def run(words: list, advice: str, shown: str = "$^", log: str = os.devnull,
        **options: object) -> None:
    """Run a command; every seven seconds a line has the time, and its last output like `shown`.

    A log, where one is named, gets all of the output. Raises SetUpFailed, with the advice, and,
    where there is no log, with what the command says is wrong.
    """
    lines, progress, ended = [], [""], threading.Event()
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                               universal_newlines=True, errors="replace", start_new_session=True,
                               **options)

    def tell():
        started = time.monotonic()
        while not ended.wait(7):
            step(f"{time.monotonic() - started:.0f} s {progress[-1]}".rstrip())

    threading.Thread(target=tell, daemon=True).start()
    try:
        for line in process.stdout:
            lines.append(line)
            progress += re.findall(shown, line)
        code = process.wait()
    except BaseException:  # Ctrl-C, say: it must not work on while another set-up takes the lock
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        ended.set()

    with open(log, "w") as file:
        file.writelines(lines)
    if code and log != os.devnull:
        raise SetUpFailed(advice)
    if code:
        begins = "\\s*(error|\N{MULTIPLICATION SIGN})"  # pip's and uv's
        errors = [number for number, line in enumerate(lines) if re.match(begins, line, re.I)]
        reason = " ".join(" ".join(lines[errors[0] if errors else -3:]).split())
        if len(reason) > 400:
            reason = f"{reason[:150]} ... {reason[-250:]}"
        raise SetUpFailed(f"{reason}: {advice}")


def alone(folder: Path) -> TextIO:
    """Lock a folder until the file that this returns is closed; wait for whoever has it."""
    file = open(folder / ".workshop-lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        step(f"waits for another set-up, which works on {folder}")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as problem:
        step(f"{folder} takes no lock ({problem.strerror}): no other set-up at the same time")
    return file
