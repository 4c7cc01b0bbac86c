"""A lab of cluster/lab.sh for tests; the test that creates it must call down()."""

import os
import shutil
import tempfile
from pathlib import Path

from conftest import BIN, ROOT, environment, needs_root, run_command

LAB_SH = ROOT / "cluster" / "lab.sh"
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork")


def unshare_command(*flags):
    """Return `unshare FLAGS`, as root or in a user's namespace; None if that is not permitted."""
    for user_flags in (), ("--user", "--map-root-user"):
        command = ["unshare", *user_flags, *flags]
        if shutil.which("unshare") and run_command([*command, "true"]).code == 0:
            return command
    return None


def unavailable_reason():
    """Return why this machine cannot run a lab, or None if it can."""
    if not shutil.which("tc", path=os.environ["PATH"] + ":/usr/sbin:/sbin"):
        return "tc: command not found; apt install iproute2"
    return None if unshare_command(*NAMESPACES) else "namespaces are not permitted here"


LAB_UNAVAILABLE = unavailable_reason()
needs_lab = needs_root(LAB_UNAVAILABLE)


class Lab:
    """A lab with a name. lab("up", 2) runs `lab.sh up 2` and checks the exit code."""

    def __init__(self, name):
        self.name = name
        self.folder = Path(tempfile.gettempdir(), f"lab-{os.getuid()}-{name}")
        self.env = environment() | {
            "LAB": name, "TMPDIR": tempfile.gettempdir(), "PATH": f"{BIN}:{os.environ['PATH']}"}

    def __call__(self, *arguments):
        """Run a command of lab.sh. Return its output."""
        result = run_command([LAB_SH, *arguments], 200, self.env)
        assert result.code == 0, result
        return result.out

    def down(self):
        if self.folder.exists():
            self("down")
