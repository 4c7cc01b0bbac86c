"""submit/lab.sh: nodes of namespaces whose link has a speed; what it promises, and what it refuses."""

import json
import os
import re
import shutil
import signal
import sys
from itertools import count
from pathlib import Path

import pytest
from conftest import BIN, PROGRAMS, ROOT, execute, lines, needs_root, wait
from lab import Lab, real_lab
from tolerances import RATE, close

NAMES = count()
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@pytest.fixture
def lab():
    lab = Lab(f"{os.getpid()}-{next(NAMES)}")
    yield lab
    lab.down()


@real_lab
def test_the_rate_is_what_was_asked_for(lab):
    """25 MB on two nodes: a ring sends them once in each direction. The rate is changed while the lab is up.

    Never more than that; nor less, where the ranks need not be quick to fill the link.
    """
    lab("up", 2, "--rate", "1gbit")
    for rate, bits in ("1gbit", 1e9), ("100mbit", 1e8):
        lab("rate", rate)
        done = lab("run", "-n", 2, sys.executable, PROGRAMS / "timed_allreduce.py", 25)
        seconds, = json.loads(done.out)
        share = 8 * 25e6 / bits / seconds
        close("rate of the lab's link", share - 1, RATE)
    close("rate of the lab's link", 1 - share, RATE)


@real_lab
@pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="/dev/net/tun may not be opened here")
def test_the_latency_is_at_least_what_was_asked_for(lab):
    """A refused connection takes one way and back; before the first, each node asks for the other's address."""
    lab("up", 2, "--latency", "100ms", "--rate", "100mbit")
    asked = "import socket, time; connect = lambda: socket.socket().connect_ex(('nid2', 9)); connect(); " \
            "started = time.perf_counter(); connect(); print(time.perf_counter() - started)"
    assert float(lab("on", "nid1", sys.executable, "-c", asked).out) >= 0.2
    assert "latency 100ms" in lab("status").out
    lab("kill", "nid2")
    assert lab("run", "-n", 1, "hostname").out == "nid1\n", "a node that dies takes no other's network with it"


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
    assert sorted(lab("run", "-n", 3, "--ppn", 2, "hostname").out.split()) == ["nid1", "nid1", "nid2"]
    switch = lab("on", "login", "ip", "-brief", "link", "show", "switch").out.split()[2]
    for node in "nid1", "nid2":
        lab("kill", node)
    now = lab("on", "login", "ip", "-brief", "link", "show", "switch").out.split()[2]
    assert now == switch, "nodes that live on know the login node by this"


@real_lab
def test_torchrun_on_two_nodes_trains_as_one_world_and_the_record_names_the_link(lab, tmp_path):
    lab("up", 2, "--rate", "1gbit")
    words = "--nnodes", 2, "--master-addr", "nid1", "--nproc-per-node", 1, "main.py", "--max-steps", 2, "--device", \
        "cpu", "--results", tmp_path / "results"
    second = lab.start("on", "nid2", BIN / "torchrun", "--node-rank", 1, *words, cwd=ROOT / "03_ddp")
    lab("on", "nid1", BIN / "torchrun", "--node-rank", 0, *words, cwd=ROOT / "03_ddp")
    assert second.wait(60) == 0
    found, = lines(tmp_path / "results")
    assert (found["ranks"], found["nodes"], found["link"]) == (2, 2, "1gbit")


@pytest.mark.fault
@real_lab
@pytest.mark.parametrize("end", ["down", "the first process is killed"])
def test_nothing_is_left_behind(end, lab):
    """Processes carry the lab's name in their environment, whatever they are."""
    lab("up", 2, "--rate", "1gbit")
    sleeper = lab.start("on", "nid2", "sleep", "1000")
    wait(lambda: lab.processes("sleep", "1000"), 20, "a command on a node")
    if end == "down":
        lab("down")
        assert not lab.folder.exists()
    else:
        os.kill(int((lab.folder / "holder").read_text()), signal.SIGKILL)
    sleeper.wait(20)
    wait(lambda: not lab.processes(), 20, "an end of all processes")
    if end != "down":
        assert re.fullmatch(r"lab.sh: the lab has died: .*down.*\n", lab("run", "-n", 1, "true", code=2).err)
        lab("up", 1)  # takes its place


@pytest.mark.fault
@real_lab
def test_a_killed_run_leaves_no_rank(lab):
    lab("up", 2)
    run = lab.start("run", "-n", 2, "sleep", "1234")
    wait(lambda: len(lab.processes("sleep", "1234")) == 2, 20, "two ranks")
    run.terminate()
    wait(lambda: not lab.processes("sleep", "1234"), 20, "an end of both ranks")


@real_lab
@needs_root(os.geteuid() and "an ordinary user runs all tests as one")
def test_an_ordinary_user_has_a_lab_too(tmp_path):
    """Root becomes nobody, who may not read everything here: a copy of lab.sh, and no Python."""
    nobody = "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", f"TMPDIR={tmp_path}"
    if execute([*nobody, "unshare", "--user", "--map-root-user", "--net", "true"]).code:
        pytest.skip("this kernel lets only root make namespaces")
    script = shutil.copy(ROOT / "submit" / "lab.sh", tmp_path)
    for folder in tmp_path, *tmp_path.parents[:3]:
        folder.chmod(0o777 if folder == tmp_path else folder.stat().st_mode | 0o011)
    words = f'"{script}" up 2 --rate 1gbit; "{script}" on nid2 sh -c "hostname; id -u; tc qdisc"; "{script}" down'
    done = execute([*nobody, "bash", "-euc", words], timeout=60, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "nid2\n65534\n" in done.out and "rate 1Gbit" in done.out


@pytest.mark.fault
@real_lab
def test_a_mistake_is_one_line_and_harms_nothing(lab):
    def refused(words, said):
        done = lab(*words.split(), code=2)
        assert re.fullmatch(r"lab\.sh: [^\n]+\n", done.err) and said in done.err and not done.out, done.err

    for words, said in [("up 0", "0 is not a whole number above 0"), ("up 2 --rate 1gbps", "1gbps is no rate"),
                        ("up 2 --fast", "no option --fast"), ("run -n 2 true", "no lab is up"), ("dance", "up NODES")]:
        refused(words, said)
        assert not lab.folder.exists()
    lab("up", 2)
    refused("up 2", f"the lab {lab.name} is up already")
    refused("on nid3 true", "there is no node nid3, but login nid1 nid2")
    refused("run -n 3 --ppn 1 true", "3 ranks are more than 1 on each of 2 nodes")
    lab("kill", "nid2")
    refused("on nid2 true", "the node nid2 is dead")
    assert "nid2 10.77.0.2 dead" in lab("status").out
    assert lab("run", "-n", 2, "hostname").out.split() == ["nid1", "nid1"]


@pytest.mark.fault
def test_where_no_lab_can_be_it_says_why(lab, tmp_path):
    (tmp_path / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    done = lab("up", 2, code=2, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    reason = "this kernel lets you make no namespaces" if shutil.which("ip", path=SBIN) else "no ip here"
    assert done.err.startswith(f"lab.sh: {reason}") and not lab.folder.exists()
