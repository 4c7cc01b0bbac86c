"""A chapter's main.py, one rank of which dies: python dying.py RANK MOMENT DEATH main.py FLAG...

MOMENT: start-up (before the ranks meet), all-reduce (the others wait in it), checkpoint (written, but not yet in its
place) or barrier (the last thing that all do). DEATH: a signal's name, exception or memory.
"""

import os
import resource
import runpy
import signal
import sys
from pathlib import Path

dying, moment, death = int(sys.argv[1]), *sys.argv[2:4]
del sys.argv[:4]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)

import ranks  # noqa: E402  the chapter's
import workshop  # noqa: E402


def die():
    rank = ranks.launched()[1]
    if rank != dying:
        return
    print(f"dies: {os.getpid()}", file=sys.stderr, flush=True)
    if death == "exception":
        raise RuntimeError(f"only on rank {rank}")
    if death == "memory":  # as where a batch system allows no more than this process has
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
        bytearray(2**30)
    os.kill(os.getpid(), signal.Signals[death])


def dies_before(function):
    def changed(*args, **options):
        die()
        return function(*args, **options)
    return changed


def dies_at_step_3(steps):
    def changed(*args, **options):
        for number, batch in enumerate(steps(*args, **options)):
            if number == 3:
                die()
            yield batch
    return changed


def dies_after(function):
    def changed(*args, **options):
        result = function(*args, **options)
        die()
        return result
    return changed


if moment == "start-up":
    workshop.make_parser = dies_after(workshop.make_parser)
elif moment == "all-reduce":
    workshop.Report.steps = dies_at_step_3(workshop.Report.steps)
elif moment == "checkpoint":
    os.replace = dies_before(os.replace)
elif moment == "barrier":
    workshop.Report.end = dies_before(workshop.Report.end)
runpy.run_path(sys.argv[0], run_name="__main__")
