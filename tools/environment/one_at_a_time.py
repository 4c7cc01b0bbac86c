"""One set-up at a time: a lock that says who is waited for. Only the standard library is used here."""

import fcntl
import os
import pwd
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def holder():
    """This process, as the others are to read it."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a number without a name, as in some containers
        user = f"user {os.getuid()}"
    return f"process {os.getpid()} of {user} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"


def take(file, place):
    """Lock the open file, and write into it who has it. Returns whether another process had it first."""
    waited = False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waited = True
        file.seek(0)
        print(f"set-up: waits for {file.read() or 'another process'}, which works on {place}", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    file.truncate(0)
    file.write(holder())
    file.flush()
    return waited


@contextmanager
def alone(path: Path, place: Path) -> Iterator[bool]:
    """Let the body work on the place in one process at a time, by a lock on the file `path`.

    Gives whether it had to wait for another.
    The lock ends with the process, however that ends. Where the file system has none, a line says so and the body runs.
    """
    with ExitStack() as stack:
        waited = False
        try:
            waited = take(stack.enter_context(open(path, "a+")), place)
        except OSError as problem:
            print(f"set-up: {path} is no lock here ({problem.strerror}): let nobody else do this at the same time",
                  flush=True)
        yield waited
