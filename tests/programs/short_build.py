"""A build of Horovod of no time, which ends when a file is there: `python short_build.py TOOLS VENV LOG FILE`."""

import sys
import time
from pathlib import Path

sys.path[0] = sys.argv[1]
import build_horovod  # noqa: E402


def build(venv, pin, folder):
    with open(sys.argv[3], "a") as file:
        file.write("built\n")
    while not Path(sys.argv[4]).exists():
        time.sleep(0.05)
    folder.mkdir(parents=True)
    (folder / "horovod.whl").touch()


build_horovod.build = build
build_horovod.VERSIONS = "print(1)"
build_horovod.compiler = lambda: "true"
build_horovod.succeeds = lambda command: True
build_horovod.install(Path(sys.argv[2]), "horovod==0.28.1")
