"""Run a main.py whose data sets come from a server of the tests: `python served.py SOURCE MAIN FLAG...`.

SOURCE is a JSON file: {"url": of the server, "sums": {file: its MD5}}. Time-outs are a thirtieth of what they are.
"""

import json
import runpy
import socket
import sys
from functools import partial
from pathlib import Path

from torchvision.datasets import MNIST, SVHN


def sooner(seconds, original):
    original(seconds / 30)


source, main = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
sys.argv = sys.argv[2:]
sys.path[0] = str(Path(main).parent)
sums = source["sums"]
socket.setdefaulttimeout = partial(sooner, original=socket.setdefaulttimeout)
MNIST.mirrors = [source["url"]]
MNIST.resources = [(name, sums[name]) for name, _ in MNIST.resources]
SVHN.split_list = {part: [source["url"] + name, name, sums[name]]
                   for part, (_, name, _) in SVHN.split_list.items() if name in sums}
runpy.run_path(main, run_name="__main__")
