"""cluster/lab.sh: namespaces as nodes, and a link of a given rate between them."""

import os
import re
import sys

import pytest
from lab import LAB_SH, Lab, needs_lab
from tolerances import LINK_RATE, assert_close

from cluster.launch import start_job


@pytest.fixture
def lab():
    lab = Lab(str(os.getpid()))
    yield lab
    lab.down()


@needs_lab
def test_a_link_has_the_given_rate(lab):
    """The doctor times an all-reduce of 16 MiB: two ranks send 16 MiB in each direction.

    The rate changes while the lab is up.
    """
    lab("up", 2, "--rate", "1gbit")
    for rate, bits in ("1gbit", 1e9), ("100mbit", 1e8):
        lab("rate", rate)
        output = lab("run", "-n", 2, sys.executable, "-m", "cluster.doctor")
        assert "ranks: 2, nodes: 2\n" in output
        seconds, = re.findall(r"^all-reduce over gloo, 16 MB: (\S+) s", output, re.M)
        relative_rate = 8 * 2**24 / bits / float(seconds)
        assert_close("rate of the lab's link", relative_rate - 1, LINK_RATE)
    # The ranks may be too slow to fill the fast link, so only the slow one is checked.
    assert_close("rate of the lab's link", 1 - relative_rate, LINK_RATE)


@pytest.mark.fault
@needs_lab
def test_other_nodes_survive_a_dead_node(lab):
    lab("up", 2)
    sleeper = start_job([LAB_SH, "on", "nid2", "sleep", 1000], env=lab.env)
    lab("kill", "nid2")
    assert sleeper.wait(20)
    assert "nid2 10.77.0.2 dead" in lab("status")
    assert lab("run", "-n", 2, "hostname").split() == ["nid1", "nid1"]
    lab("down")
    assert not lab.folder.exists()
