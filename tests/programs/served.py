"""Run a main.py that downloads from a test server: `python served.py SERVER MAIN FLAG...`.

SERVER is a JSON file: {"url": the server's, "sums": {file name: MD5 sum}}.
"""

import json
import runpy
import sys
from pathlib import Path

from torchvision.datasets import MNIST, SVHN

_, path, *sys.argv = sys.argv
server = json.loads(Path(path).read_text())
url, sums = server["url"], server["sums"]
MNIST.mirrors = [url]
MNIST.resources = [(name, sums.get(name)) for name, _ in MNIST.resources]
for split, (_, name, _) in SVHN.split_list.items():
    SVHN.split_list[split] = [url + name, name, sums.get(name)]
runpy.run_path(sys.argv[0], run_name="__main__")
