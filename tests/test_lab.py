"""submit/lab.sh: nodes of namespaces whose link has a speed; what it promises, and refuses."""

import os
import re
import shutil
import sys
from itertools import count
from pathlib import Path

import pytest
from conftest import ROOT, execute, needs_root
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
    """The doctor's all-reduce of 16 MiB, which a ring of two sends once in each direction.

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
def test_nodes_have_names_and_addresses_of_their_own_and_share_no_memory(lab, tmp_path):
    lab("up", 2)
    for node in "nid1", "nid2", "login":
        assert lab("on", node, "hostname").out == f"{node}\n"
    assert "10.77.0.2/24" in lab("on", "nid2", "ip", "-brief", "address", "show", "eth0").out
    mine = Path("/dev/shm", tmp_path.name)  # of this test alone: another may have left one
    lab("on", "nid2", "touch", mine)
    assert not lab("on", "nid1", "ls", "/dev/shm").out and not mine.exists()
    lab("on", "nid1", "sh", "-c", "exit 7", code=7)
    hosts = lab("run", "-n", 3, "--ppn", 2, "hostname").out.split()
    assert sorted(hosts) == ["nid1", "nid1", "nid2"]


@pytest.mark.fault
@real_lab
def test_a_node_dies_and_others_live_on(lab):
    lab("up", 2)
    sleeper = lab.start("on", "nid2", "sleep", "1000")
    lab("kill", "nid2")
    assert sleeper.wait(20)
    assert "nid2 10.77.0.2 dead" in lab("status").out
    assert lab("run", "-n", 2, "hostname").out.split() == ["nid1", "nid1"]
    lab("down")
    assert not lab.folder.exists()


@real_lab
@needs_root(os.geteuid() and "an ordinary user runs all tests as one")
def test_an_ordinary_user_has_a_lab_too(tmp_path):
    """Root becomes nobody, who may not read everything here: a copy of lab.sh, and no Python."""
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env",
              f"TMPDIR={tmp_path}"]
    if execute([*nobody, "unshare", "--user", "--map-root-user", "--net", "true"]).code:
        pytest.skip("this kernel lets only root make namespaces")
    script = shutil.copy(ROOT / "submit" / "lab.sh", tmp_path)
    for folder in tmp_path, *tmp_path.parents[:3]:
        folder.chmod(0o777 if folder == tmp_path else folder.stat().st_mode | 0o011)
    words = (f'"{script}" up 2 --rate 1gbit; "{script}" on nid2 sh -c "hostname; id -u; tc qdisc"; '
             f'"{script}" down')
    done = execute([*nobody, "bash", "-euc", words], timeout=60, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "nid2\n65534\n" in done.out and "rate 1Gbit" in done.out
