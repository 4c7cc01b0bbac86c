"""Run a main.py whose data sets come from a server of the tests: `python served.py SOURCE MAIN FLAG...`.

SOURCE is a JSON file: {"url": of the server, "sums": {file: its MD5}}.
"""

import json
import runpy
import sys
from pathlib import Path

if "tensorflow" in sys.modules:
    sys.modules["triton"] = None  # beside TensorFlow it crashes: see workshop.py
from torchvision.datasets import MNIST, SVHN

source, main = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
sys.argv = sys.argv[2:]
sys.path[0] = str(Path(main).parent)
sums = source["sums"]
MNIST.mirrors = [source["url"]]
MNIST.resources = [(name, sums.get(name)) for name, _ in MNIST.resources]
SVHN.split_list = {part: [source["url"] + name, name, sums.get(name)]
                   for part, (_, name, _) in SVHN.split_list.items()}
runpy.run_path(main, run_name="__main__")
