"""submit/lab.sh: nodes made of namespaces, with a link of a given rate."""

import os
import re
import sys
from itertools import count
from pathlib import Path

import pytest
from conftest import ROOT
from lab import Lab, real_lab
from tolerances import RATE, close

NAMES = count()


@pytest.fixture
def lab():
    lab = Lab(f"{os.getpid()}-{next(NAMES)}")
    yield lab
    lab.down()


@real_lab
def test_the_rate_is_what_was_asked_for(lab):
    """Time the doctor's all-reduce of 16 MiB, which two ranks send once in each direction.

    The rate is changed while the lab is up.
    """
    lab("up", 2, "--rate", "1gbit")
    for rate, bits in ("1gbit", 1e9), ("100mbit", 1e8):
        lab("rate", rate)
        done = lab("run", "-n", 2, sys.executable, ROOT / "submit" / "doctor.py")
        assert "ranks: 2, nodes: 2\n" in done.out
        seconds, = re.findall(r"^all-reduce over gloo, 16 MB: (\S+) s", done.out, re.M)
        share = 8 * 2**24 / bits / float(seconds)
        close("rate of the lab's link", share - 1, RATE)  # never more
    close("rate of the lab's link", 1 - share, RATE)  # nor less, on a slow link


@real_lab
def test_nodes_have_own_names_addresses_and_memory(lab, tmp_path):
    lab("up", 2)
    for node in "nid1", "nid2", "login":
        assert lab("on", node, "hostname").out == f"{node}\n"
    assert "10.77.0.2/24" in lab("on", "nid2", "ip", "-brief", "address", "show", "eth0").out
    mine = Path("/dev/shm", tmp_path.name)  # a name of this test only
    lab("on", "nid2", "touch", mine)
    assert not lab("on", "nid1", "ls", "/dev/shm").out and not mine.exists()
    lab("on", "nid1", "sh", "-c", "exit 7", code=7)
    hosts = lab("run", "-n", 3, "--ppn", 2, "hostname").out.split()
    assert sorted(hosts) == ["nid1", "nid1", "nid2"]


@pytest.mark.fault
@real_lab
def test_other_nodes_survive_a_dead_node(lab):
    lab("up", 2)
    sleeper = lab.start("on", "nid2", "sleep", "1000")
    lab("kill", "nid2")
    assert sleeper.wait(20)
    assert "nid2 10.77.0.2 dead" in lab("status").out
    assert lab("run", "-n", 2, "hostname").out.split() == ["nid1", "nid1"]
    lab("down")
    assert not lab.folder.exists()
