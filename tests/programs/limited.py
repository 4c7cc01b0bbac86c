"""Kill a chapter's main.py while it saves: `python limited.py WHEN MAIN FLAG...`.

WHEN is a number of bytes, "before" or "after". A rank that writes more bytes into one file is
killed during the write. "before", "after": rank 0 is killed just before or just after the new
checkpoint replaces the old one.
"""

import os
import resource
import runpy
import signal
import sys

_, when, *sys.argv = sys.argv
real_replace = os.replace


def replace_and_die(*names):
    if when == "after":
        real_replace(*names)
    os.kill(os.getpid(), signal.SIGKILL)


if when.isdecimal():
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would raise an exception
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(when), int(when)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
else:
    os.replace = replace_and_die
runpy.run_path(sys.argv[0], run_name="__main__")
