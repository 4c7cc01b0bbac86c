"""The lab of scaling.ipynb and submit/LAB.md: no lab stays, and the page's commands print what stands there."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import BIN, ROOT, execute
from lab import real_lab

from tools.notebooks import lab


@pytest.mark.fault
def test_the_kernel_may_be_interrupted(tmp_path):
    """The interrupt goes to all processes of the kernel's group, as Jupyter's does; the lab is taken down."""
    (tmp_path / "lab.sh").write_text('if [ "$1" = run ]; then echo begun >"${0%lab.sh}begun"; sleep 100; fi\n'
                                     'if [ "$1" = down ]; then sleep 0.5; echo gone >"${0%lab.sh}gone"; fi\n')
    program = ("import sys; from pathlib import Path; from tools.notebooks import lab; lab.LAB = Path(sys.argv[1]); "
               "lab.trained('1gbit', '100mbit', 2, 4, print)")
    process = subprocess.Popen([sys.executable, "-c", program, tmp_path / "lab.sh"], cwd=ROOT, start_new_session=True,
                               stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "begun").exists() and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert (tmp_path / "gone").exists()


@real_lab
@pytest.mark.slow
def test_the_page_s_five_commands_print_what_stands_there():
    """But for the lab's name and all that is measured: losses, accuracies, images/s."""
    commands, printed = (ROOT / "submit" / "LAB.md").read_text().split("```")[1:4:2]
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    done = execute(["bash", "-ec", commands.replace(". .venv/bin/activate\n", "")], cwd=ROOT,
                   env=lab.environment() | {"PATH": path})
    assert done.code == 0 and not done.err

    def same(text):
        return re.sub(r"^lab \S+:|(?<=: )loss .*|(?<=accuracy ).*", "", text.strip(), flags=re.M)

    assert same(done.out) == same(printed)
