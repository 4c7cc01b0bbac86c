"""submit/lab.sh: nodes of namespaces whose link has a speed; what it promises, and what it refuses."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil
import pytest
from conftest import BIN, PROGRAMS, ROOT, case, environment, execute, lines
from lab import LAB, Lab, real_lab
from tolerances import RATE, close

NAMES = count()


@pytest.fixture
def lab():
    lab = Lab(f"{os.getpid()}-{next(NAMES)}")
    yield lab
    lab.down()


def all_reduces(lab, *megabytes):
    """Seconds of gloo's all-reduce on one rank a node, by megabytes: the fastest of eight."""
    done = lab("run", "-n", 2, sys.executable, PROGRAMS / "timed_allreduce.py", *megabytes)
    return json.loads(done.out)


@real_lab
def test_the_rate_is_what_was_asked_for(lab):
    """25 MB on two nodes: a ring sends them once in each direction. The rate is changed while the lab is up.

    Never more than that; nor less, where the ranks need not be quick to fill the link.
    """
    lab("up", 2, "--rate", "1gbit")
    for rate, bits in ("1gbit", 1e9), ("100mbit", 1e8):
        lab("rate", rate)
        seconds, = all_reduces(lab, 25)
        share = 8 * 25e6 / bits / seconds
        close("rate of the lab's link", share - 1, RATE)
    close("rate of the lab's link", 1 - share, RATE)
    lab("rate", "none")
    assert all_reduces(lab, 25)[0] < seconds / 3, "no limit is no slower than a tenth of it"


@real_lab
@pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="/dev/net/tun may not be opened here")
def test_the_latency_is_at_least_what_was_asked_for(lab):
    """Of an all-reduce's four bytes, too: each node has to hear from the other what it has."""
    lab("up", 2, "--latency", "100ms", "--rate", "100mbit")
    assert all_reduces(lab, "1e-6")[0] >= 0.1
    assert "latency 100ms" in lab("status").out


@real_lab
def test_nodes_have_names_and_addresses_of_their_own_and_share_no_memory(lab, tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    lab("up", 3)
    for node in "nid1", "nid3", "login":
        assert lab("on", node, "hostname", cwd=folder).out == f"{node}\n"
    assert lab("on", "nid2", "pwd", cwd=folder).out == f"{folder}\n"
    assert "10.77.0.2/24" in lab("on", "nid2", "ip", "-brief", "address", "show", "eth0").out
    mine = Path("/dev/shm", tmp_path.name)  # of this test alone: another may have left one
    lab("on", "nid2", "touch", mine)
    assert not lab("on", "nid3", "ls", "/dev/shm").out and not mine.exists()
    assert lab("on", "nid1", "sh", "-c", "exit 7", code=7)


@real_lab
@pytest.mark.parametrize(("words", "hosts"), [
    (("-n", 2), ["nid1", "nid2"]), (("-n", 4), ["nid1", "nid1", "nid2", "nid2"]), (("-n", 1), ["nid1"]),
    (("-n", 3, "--ppn", 2), ["nid1", "nid1", "nid2"])])
def test_ranks_are_spread_over_the_nodes(words, hosts, lab):
    lab("up", 2)
    assert sorted(lab("run", *words, "hostname").out.split()) == hosts


@real_lab
@pytest.mark.parametrize("chapter", [case("02_horovod/pytorch"), case("03_ddp"), case("04_deepspeed")])
def test_a_chapter_trains_on_two_nodes_and_its_record_names_the_link(chapter, lab, tmp_path):
    lab("up", 2, "--rate", "1gbit")
    flags = sys.executable, "main.py", "--max-steps", 2, "--device", "cpu", "--results", tmp_path / "results"
    lab("run", "-n", 2, *flags, cwd=ROOT / chapter)
    found, = lines(tmp_path / "results")
    assert (found["ranks"], found["nodes"], found["link"]) == (2, 2, "1gbit")


@real_lab
@pytest.mark.parametrize("chosen", ["eth0", "lo"])
def test_gloo_takes_the_interface_that_is_named(chosen, lab):
    """Through eth0 it meets the other node; through lo, which no other node sees, it cannot."""
    lab("up", 2)
    done = lab("run", "-n", 2, sys.executable, PROGRAMS / "timed_allreduce.py", 1, code=None,
               env={"GLOO_SOCKET_IFNAME": chosen}, timeout=100)
    assert (done.code == 0) == (chosen == "eth0"), done.err


@real_lab
def test_torchrun_on_two_nodes_trains_as_one_world(lab, tmp_path):
    lab("up", 2)
    words = "--nnodes", 2, "--master-addr", "nid1", "--nproc-per-node", 1, "main.py", "--max-steps", 2, "--device", \
        "cpu", "--results", tmp_path / "results"
    second = lab.start("on", "nid2", BIN / "torchrun", "--node-rank", 1, *words, cwd=ROOT / "03_ddp")
    lab("on", "nid1", BIN / "torchrun", "--node-rank", 0, *words, cwd=ROOT / "03_ddp")
    assert second.wait(60) == 0
    found, = lines(tmp_path / "results")
    assert (found["ranks"], found["nodes"]) == (2, 2)


@real_lab
def test_labs_lie_side_by_side(lab):
    with Lab(f"{lab.name}-other") as other:
        lab("up", 1, "--rate", "1gbit")
        other("up", 2, "--rate", "10mbit")
        assert "nid2" not in lab("status").out and "link 1gbit" in lab("status").out
        assert "nid2 10.77.0.2 up" in other("status").out and "link 10mbit" in other("status").out
    assert "nid1 10.77.0.1 up" in lab("status").out


@real_lab
def test_up_takes_less_than_two_seconds(lab):
    """The fastest of three: the machine may be busy."""
    def seconds():
        started = time.monotonic()
        lab("up", 4, "--rate", "1gbit")
        taken = time.monotonic() - started
        lab("down")
        return taken

    assert min(seconds() for _ in range(3)) < 2


def interfaces():
    return {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}


def namespaces():
    """Of all processes, the network namespaces."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            found.add(os.readlink(process / "ns" / "net"))
    return found


@real_lab
@pytest.mark.parametrize("end", ["down", "the first process is killed", "its parent is killed"])
def test_nothing_is_left_behind(end, lab):
    """Processes carry the lab's name in their environment, whatever they are."""
    before = interfaces(), namespaces()
    lab("up", 2, "--rate", "1gbit")
    sleeper = lab.start("on", "nid2", "sleep", "1000")
    deadline = time.monotonic() + 20
    while not any(one.info["cmdline"] == ["sleep", "1000"] and one.pid != sleeper.pid
                  for one in psutil.process_iter(["cmdline"])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(lab.processes()) > 4
    holder = int((lab.folder / "holder").read_text())
    if end == "down":
        lab("down")
        assert not lab.folder.exists()
    else:
        os.kill(holder if "first" in end else psutil.Process(holder).ppid(), signal.SIGKILL)
    sleeper.wait(20)
    deadline = time.monotonic() + 20
    while (lab.processes() or namespaces() - before[1]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lab.processes() and interfaces() == before[0] and not namespaces() - before[1]
    if end != "down":
        assert re.fullmatch(r"lab.sh: the lab has died: .*down.*\n", lab("run", "-n", 1, "true", code=2).err)
        lab("up", 1)  # takes its place


@real_lab
def test_a_killed_run_leaves_no_rank(lab):
    lab("up", 2)
    run = lab.start("run", "-n", 2, "sleep", "1234")
    deadline = time.monotonic() + 20
    while len(lab.processes("sleep", "1234")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(lab.processes("sleep", "1234")) == 2
    run.terminate()
    while lab.processes("sleep", "1234") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lab.processes("sleep", "1234")


@real_lab
@pytest.mark.skipif(os.geteuid() != 0, reason="this is no test for root alone: whoever runs it is an ordinary user")
def test_an_ordinary_user_has_a_lab_too(tmp_path):
    """Root becomes nobody, who may not read everything here: a copy of lab.sh, and no Python."""
    nobody = "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", f"TMPDIR={tmp_path}"
    if execute([*nobody, "unshare", "--user", "--map-root-user", "--net", "true"]).code:
        pytest.skip("this kernel lets only root make namespaces")
    script = shutil.copy(ROOT / "submit" / "lab.sh", tmp_path)
    for folder in tmp_path, *tmp_path.parents[:3]:
        folder.chmod(0o777 if folder == tmp_path else folder.stat().st_mode | 0o011)
    words = f'"{script}" up 2 --rate 1gbit; "{script}" on nid2 sh -c "hostname; id -u; tc qdisc"; "{script}" down'
    done = execute([*nobody, "bash", "-euc", words], timeout=60)
    assert done.code == 0, done.err
    assert "nid2\n65534\n" in done.out and "rate 1Gbit" in done.out


# What is refused

@real_lab
@pytest.mark.parametrize(("words", "said"), [
    ("up", "up wants a value"), ("up 0", "0 is not a whole number above 0"), ("up two", "two is not a whole number"),
    ("up 1.5", "1.5 is not"), ("up 33", "33 nodes are too many for one machine: at most 32"),
    ("up 2 --rate", "--rate wants a value"), ("up 2 --rate fast", "fast is no rate: 100mbit"),
    ("up 2 --rate 0gbit", "0gbit is no rate"), ("up 2 --rate 1gbps", "no rate"), ("up 2 --rate -1gbit", "no rate"),
    ("up 2 --latency 3", "3 is no latency: 1ms"), ("up 2 --latency 0ms", "0ms is no latency"),
    ("up 2 --fast", "up: no option --fast"),
    ("run -n 2 true", "no lab is up: submit/lab.sh up 2"), ("on nid1 true", "no lab is up"), ("status", "no lab is up"),
    ("rate 1gbit", "no lab is up"), ("kill nid1", "no lab is up"), ("down", "no lab is up"), ("rate", "rate wants a"),
    ("rate 1", "1 is no rate"), ("run", "usage: run -n RANKS"), ("run -n", "-n wants a value"),
    ("run -n 0 true", "-n: 0 is not"), ("run true", "usage: run -n RANKS"), ("run -n 2", "usage: run"),
    ("run -x 2 true", "run: no option -x"), ("on nid1", "usage: on NODE COMMAND"), ("kill", "kill wants a value"),
    ("", "up NODES"), ("dance", "up NODES"), ("--help", "up NODES")])
def test_a_mistake_without_a_lab_is_one_line(words, said, lab):
    done = lab(*words.split(), code=2)
    assert re.fullmatch(r"lab\.sh: [^\n]+\n", done.err) and said in done.err and not done.out
    assert not lab.folder.exists()


@real_lab
def test_a_mistake_in_a_lab_is_one_line_and_harms_nothing(lab):
    lab("up", 2)
    for words, said in [
            ("up 2", f"the lab {lab.name} is up already"),
            ("on nid3 true", "there is no node nid3, but login nid1 nid2"),
            ("on ../nodes true", "there is no node"), ("on nid true", "there is no node nid,"),
            ("kill nid7", "there is no node nid7"), ("kill login", "the login node is the lab itself"),
            ("run -n 3 --ppn 1 true", "3 ranks are more than 1 on each of 2 nodes"), ("rate x", "x is no rate")]:
        done = lab(*words.split(), code=2)
        assert re.fullmatch(r"lab\.sh: [^\n]+\n", done.err) and said in done.err and not done.out, done.err
    lab("kill", "nid2")
    assert "the node nid2 is dead" in lab("on", "nid2", "true", code=2).err
    assert "nid2 10.77.0.2 dead" in lab("status").out
    assert lab("run", "-n", 2, "hostname").out.split() == ["nid1", "nid1"]


@pytest.mark.parametrize(("name", "line", "said"), [
    ("unshare", "exit 1", "this kernel lets you make no namespaces"), ("uname", "echo Darwin", "take a Linux machine"),
    ("mkdir", "exit 1", "cannot make the folder")])
def test_where_no_lab_can_be_it_says_why(name, line, said, lab, tmp_path):
    if name == "mkdir" and LAB:
        pytest.skip(LAB)
    (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
    (tmp_path / name).chmod(0o755)
    done = lab("up", 2, code=2, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert re.fullmatch(r"lab\.sh: [^\n]+\n", done.err) and said in done.err and not lab.folder.exists()


def test_a_program_that_is_not_here_is_named_with_its_package(tmp_path):
    for name in "bash", "dirname", "uname", "ip":
        (tmp_path / name).symlink_to(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "/bin/true")
    (tmp_path / "lab.sh").write_text(
        (ROOT / "submit" / "lab.sh").read_text().replace('PATH="$PATH:/usr/sbin:/sbin"', ""))
    done = subprocess.run([tmp_path / "bash", tmp_path / "lab.sh", "up", "2"], env={"PATH": str(tmp_path)}, text=True,
                          capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "lab.sh: no tc here: apt install iproute2\n"), done.stderr


@pytest.mark.parametrize("name", ["../x", "a b", "ü"])
def test_a_lab_s_name_is_refused_where_it_could_be_a_path(name):
    done = execute([ROOT / "submit" / "lab.sh", "up", 1], env=environment() | {"LAB": name})
    assert done.code == 2 and (LAB or "a name has letters" in done.err), done.err
