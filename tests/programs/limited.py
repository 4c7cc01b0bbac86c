"""Kill a chapter's main.py while it saves: `python limited.py WHEN MAIN FLAG...`.

WHEN: a number of bytes: a rank that writes more into one file is killed during the write; or before
or after: rank 0 is killed just before or after the new checkpoint replaces the old one.
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
