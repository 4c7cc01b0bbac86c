"""The lab of scaling.ipynb and submit/LAB.md: two nodes train while the link is turned down, and no lab stays."""

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


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """As the notebook's first cell sets it."""
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")


@real_lab
@pytest.mark.slow
def test_two_nodes_train_while_the_link_is_turned_down():
    """No more bytes pass than the link's rate lets, and what a bucket of 32 kB lets pass at once in each step."""
    found = lab.trained("1gbit", "20mbit", after=2, epochs=5, watch=lambda _: None)
    assert found["ranks"] == found["nodes"] == 2 and found["parameters"] == 53_002
    slowest = (lab.sent(found) - 32 * 1024) * 8 / 20e6
    assert max(lab.halves(found)[1]) <= 64 / slowest
    done = execute(lab.command("status"), env=lab.environment())
    assert done.code == 2 and "no lab is up" in done.err


@pytest.mark.fault
def test_the_kernel_may_be_interrupted(tmp_path):
    """The interrupt goes to all processes of the kernel's group, as Jupyter's does; the lab is taken down."""
    (tmp_path / "lab.sh").write_text('if [ "$1" = run ]; then echo begun >"${0%lab.sh}begun"; sleep 100; fi\n'
                                     'if [ "$1" = down ]; then sleep 0.5; echo gone >"${0%lab.sh}gone"; fi\n')
    program = ("import sys; from pathlib import Path; from tools.notebooks import lab; lab.LAB = Path(sys.argv[1]); "
               "lab.trained('1gbit', '100mbit', 2, 4, print)")
    process = subprocess.Popen([sys.executable, "-c", program, tmp_path / "lab.sh"], cwd=ROOT, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
    done = execute(["bash", "-ec", commands.replace(". .venv/bin/activate\n", "")], cwd=ROOT, env=lab.environment())
    assert done.code == 0 and not done.err

    def same(text):
        return re.sub(r"^lab \S+:|(?<=: )loss .*|(?<=accuracy ).*", "", text.strip(), flags=re.M)

    assert same(done.out) == same(printed)
