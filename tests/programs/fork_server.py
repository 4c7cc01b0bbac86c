"""Forks ranks from a process that has imported what they need: `python fork_server.py MODULE...`, see forked.py.

Reads jobs from standard input, a JSON line each, and answers each with a line: the ranks' exit codes, negative for a
signal, and whether all ended in time.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

AFTER_A_FAILURE = 10  # seconds that the other ranks have to end in


def rank_main(words, cwd, env, printed):
    """What a rank does: the words of a python command, its output into two files. Returns its exit code."""
    os.setsid()  # so that what it starts ends with it
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, path in zip((1, 2), printed):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))  # as python does
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork(*job):
    """A rank's process id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            code = rank_main(*job)
            atexit._run_exitfuncs()  # as multiprocessing does in what it has forked
            sys.stdout.flush()
        finally:
            os._exit(code)
    return process


def do(words, cwd, ranks, timeout):
    """Start the ranks, pairs of environment and two paths. Returns their codes, and whether all ended in time."""
    running = {fork(words, cwd, *rank): number for number, rank in enumerate(ranks)}
    processes, codes = list(running), [None] * len(ranks)
    deadline = time.monotonic() + timeout
    failed = False
    while running and time.monotonic() < deadline:
        for process in list(running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                code = codes[running.pop(process)] = os.waitstatus_to_exitcode(status)
                if code and not failed:  # as a launcher, end the others
                    failed = True
                    deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE)
        time.sleep(0.01)
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    for process, number in running.items():
        codes[number] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return codes, failed or not running


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # a line at once
    os.dup2(2, 1)  # what modules say when they are imported is no answer
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(do(**json.loads(line))), file=answers)
