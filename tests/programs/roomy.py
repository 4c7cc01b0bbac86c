"""A main.py with so many more bytes than it has when its data are loaded: python roomy.py BYTES MAIN FLAG..."""

import os
import re
import resource
import runpy
import sys
from pathlib import Path

room, main = int(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]
sys.path[0] = os.path.dirname(main)
import workshop  # noqa: E402 - the main.py's own


def load_tensors(args, load=workshop.load_tensors):
    tensors = load(args)
    used = 1024 * int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
    return tensors


workshop.load_tensors = load_tensors
runpy.run_path(main, run_name="__main__")
