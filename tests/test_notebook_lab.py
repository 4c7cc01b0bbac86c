"""The cell of scaling.ipynb that trains on a lab takes it down, however it ends."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT


@pytest.mark.fault
def test_the_kernel_may_be_interrupted(tmp_path):
    """Jupyter sends the interrupt to all processes of the kernel's group."""
    cells = json.loads((ROOT / "03_ddp" / "scaling.ipynb").read_text())["cells"]
    source = next("".join(cell["source"]) for cell in cells if cell["id"] == "lab-train")
    program = f"import os, re, subprocess, time\n{source}\ntrain()".replace("../submit/", "")
    (tmp_path / "lab.sh").write_text('if [ "$1" = run ]; then echo >begun; sleep 100; fi\n'
                                     'if [ "$1" = down ]; then sleep 0.5; echo >gone; fi\n')
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path,
                               start_new_session=True, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "begun").exists() and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert (tmp_path / "gone").exists()
