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


def load_data(args, global_batch, load=workshop.load_data):
    data = load(args, global_batch)
    used = 1024 * int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
    return data


workshop.load_data = load_data
runpy.run_path(main, run_name="__main__")
