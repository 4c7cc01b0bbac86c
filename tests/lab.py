"""A lab of submit/lab.sh for tests; whoever makes one takes it down."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

from conftest import BIN, ROOT, environment, needs_root

SPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true")


def why_not():
    """Return why there can be no lab on this machine; None where there can."""
    if not shutil.which("tc", path=os.environ["PATH"] + ":/usr/sbin:/sbin"):
        return "no tc here: apt install iproute2"
    for words in (), ("--user", "--map-root-user"):
        if subprocess.run(["unshare", *words, *SPACES], capture_output=True).returncode == 0:
            return None
    return "this kernel allows no namespaces here"


LAB = why_not()
real_lab = needs_root(LAB)


class Lab:
    """The lab of a name. Calling it runs a command of lab.sh, which has to end as expected."""

    def __init__(self, name):
        self.name = name
        self.folder = Path(tempfile.gettempdir(), f"lab-{os.getuid()}-{name}")
        self.env = environment() | {
            "LAB": name, "TMPDIR": tempfile.gettempdir(), "PATH": f"{BIN}:{os.environ['PATH']}"}

    def start(self, *words, env=None, **options):
        return subprocess.Popen(
            [str(word) for word in (ROOT / "submit" / "lab.sh", *words)],
            env=self.env | (env or {}), text=True, stdin=subprocess.DEVNULL, **options)

    def __call__(self, *words, code=0, timeout=200, **options):
        """Return its standard output and standard error."""
        process = self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert code == process.returncode, (process.returncode, out, err)
        return SimpleNamespace(out=out, err=err)

    def down(self):
        if self.folder.exists():
            self("down")
