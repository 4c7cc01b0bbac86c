"""A main.py that may allocate so many bytes after its data: `python roomy.py BYTES MAIN FLAG...`"""

import re
import resource
import runpy
import sys
from pathlib import Path

import workshop  # main.py's own

_, room, *sys.argv = sys.argv


def load_data(*args, original=workshop.load_data):
    data = original(*args)
    status = Path("/proc/self/status").read_text()
    limit = 1024 * int(re.search(r"VmData:\s+(\d+)", status)[1]) + int(room)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return data


workshop.load_data = load_data
runpy.run_path(sys.argv[0], run_name="__main__")
