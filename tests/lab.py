"""A lab of cluster/lab.sh for tests; the test that creates it must call down()."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

from conftest import BIN, ROOT, environment, needs_root

NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork")


def unavailable_reason():
    """Return why this machine cannot run a lab, or None if it can."""
    if not shutil.which("tc", path=os.environ["PATH"] + ":/usr/sbin:/sbin"):
        return "tc: command not found; apt install iproute2"
    for user_flags in (), ("--user", "--map-root-user"):
        command = ["unshare", *user_flags, *NAMESPACES, "true"]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return None
    return "namespaces are not permitted here"


LAB_UNAVAILABLE = unavailable_reason()
needs_lab = needs_root(LAB_UNAVAILABLE)


class Lab:
    """A lab with a name. lab("up", 2) runs `lab.sh up 2` and checks the exit code."""

    def __init__(self, name):
        self.name = name
        self.folder = Path(tempfile.gettempdir(), f"lab-{os.getuid()}-{name}")
        self.env = environment() | {
            "LAB": name, "TMPDIR": tempfile.gettempdir(), "PATH": f"{BIN}:{os.environ['PATH']}"}

    def start(self, *arguments, **options):
        return subprocess.Popen(
            [str(argument) for argument in (ROOT / "cluster" / "lab.sh", *arguments)],
            env=self.env, text=True, stdin=subprocess.DEVNULL, **options)

    def __call__(self, *arguments):
        """Run a command of lab.sh. Return its stdout and stderr."""
        process = self.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=200)
        finally:
            process.kill()
        assert process.returncode == 0, (out, err)
        return SimpleNamespace(out=out, err=err)

    def down(self):
        if self.folder.exists():
            self("down")
