"""Run a main.py that downloads from a test server: `python served.py SOURCE MAIN FLAG...`.

SOURCE is a JSON file: {"url": the server's, "sums": {file: MD5}}.
"""

import json
import runpy
import sys
from pathlib import Path

from torchvision.datasets import MNIST, SVHN

_, path, *sys.argv = sys.argv
source = json.loads(Path(path).read_text())
sums = source["sums"]
MNIST.mirrors = [source["url"]]
MNIST.resources = [(name, sums.get(name)) for name, _ in MNIST.resources]
SVHN.split_list = {part: [source["url"] + name, name, sums.get(name)]
                   for part, (_, name, _) in SVHN.split_list.items()}
runpy.run_path(sys.argv[0], run_name="__main__")
