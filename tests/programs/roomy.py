"""A main.py with so many more bytes than it has when it loads its data: `python roomy.py BYTES MAIN FLAG...`."""

import re
import resource
import runpy
import sys
from pathlib import Path

import workshop  # main.py's own

_, room, *sys.argv = sys.argv


def load_tensors(args, original=workshop.load_tensors):
    tensors = original(args)
    status = Path("/proc/self/status").read_text()
    limit = 1024 * int(re.search(r"VmData:\s+(\d+)", status)[1]) + int(room)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return tensors


workshop.load_tensors = load_tensors
runpy.run_path(sys.argv[0], run_name="__main__")
