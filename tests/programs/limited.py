"""A chapter's main.py that dies while it saves: `python limited.py WHEN MAIN FLAG...`.

WHEN: a number of bytes: the rank that writes more of them into one file is killed within that
write. Or before or after: rank 0 is killed when the new checkpoint is about to take the place of
the old one, or has just done it.
"""

import os
import resource
import runpy
import signal
import sys

_, when, *sys.argv = sys.argv
replace = os.replace


def killed_replace(*names):
    if when == "after":
        replace(*names)
    os.kill(os.getpid(), signal.SIGKILL)


if when.isdecimal():
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would raise an exception
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(when),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
else:
    os.replace = killed_replace
runpy.run_path(sys.argv[0], run_name="__main__")
