"""What the demo says of more ranks: words follow numbers, and its lab is gone whatever happens."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
from conftest import ROOT
from lab import real_lab
from paying_runs import left_out, paying_run

from tools.measuring import paying


def said(*speeds, one=None, here=None, slow=None):
    """What is said of one rank, two, and two over a link, at these images/s, with these changes."""
    changes = (one or {}, here or {}, {"link": "1gbit"} | (slow or {}))
    return paying.table(pandas.DataFrame([
        paying_run(ranks, speed, **more) for ranks, speed, more in zip((1, 2, 2), speeds, changes)]))


def test_words_follow_the_numbers():
    """A step of one rank takes 10 ms; 1 MB takes 8 ms at 1 Gbit/s."""
    text = said(1000, 1600, 500)
    assert "Here: yes, 1.60 times the images/s of one rank" in text
    assert "computes for 10 ms and waits for 2.5 ms." in text
    assert "At 1 Gbit/s: no, 0.50 times" in text and "take 8.0 ms on the link, no longer than the computing" in text
    assert "longer than the computing" in said(1000, 1600, 500, slow={"gradient_bytes": 2e6})
    assert "no longer" not in said(1000, 1600, 500, slow={"gradient_bytes": 2e6})
    text = said(1000, 700, 1900)
    assert "Here: no, 0.70 times" in text and "At 1 Gbit/s: yes, 1.90 times" in text
    assert "Here: just even, 1.01 times" in said(1000, 1010, 500)


def test_words_of_why_two_ranks_gain_nothing():
    assert "other programs" not in said(1000, 1600, 500) and "share" not in said(1000, 1600, 500)
    assert "2 ranks share 1 core;" in said(1000, 900, 500, here={"cpus": 1})
    assert "other programs had 1.2 of 2 cores;" in said(1000, 900, 500, here={"others": 1.2})
    assert "other programs" not in said(1000, 900, 500, here={"others": 1.2, "cpus": 4})
    text = said(1000, 2500, 500, one={"others": 1.7})
    assert "more than 2 ranks can give" in text and "other programs had 1.7 of 2 cores" in text


def test_words_of_what_is_left_out():
    records = [paying_run(1, 1000), paying_run(2, 1600), left_out()]
    line, = [line for line in paying.table(pandas.DataFrame(records)).splitlines() if "left out" in line]
    assert line.endswith(" 2 left out: lab.sh: no tc here: apt install iproute2")
    assert "At 1 Gbit/s" not in paying.table(pandas.DataFrame(records))
    assert paying.table(pandas.DataFrame([paying_run(1, 5, dataset="digits")])) == ""


def folder():
    return Path(tempfile.gettempdir(), f"lab-{os.getuid()}-demo-{os.getpid()}")


def test_a_lab_that_cannot_be_is_left_out_in_one_line(tmp_path, monkeypatch):
    script = tmp_path / "submit" / "lab.sh"
    script.parent.mkdir()
    script.write_text("echo lab.sh: this kernel lets you make no namespaces; exit 2\n")
    monkeypatch.setattr(paying, "ROOT", tmp_path)
    record = paying.scale("03_ddp", 2, "1gbit")
    assert record["left_out"] == "lab.sh: this kernel lets you make no namespaces" and record["git"]
    script.write_text('[ "$1" != run ] || { echo no such rank; exit 3; }\n')
    assert paying.scale("03_ddp", 2, "1gbit")["left_out"] == "no such rank"


@real_lab
def test_a_run_that_fails_leaves_no_lab():
    with pytest.raises(subprocess.CalledProcessError), paying.nodes_up(2, "1gbit"):
        assert folder().exists()
        paying.lab("run", "-n", 2, "false", check=True, timeout=60)
    assert not folder().exists()


@real_lab
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_demo_leaves_no_lab(how):
    source = ("from tools.measuring import paying; import os, time\n"
              "with paying.nodes_up(2, '1gbit'):\n    print(os.getpid(), flush=True)\n"
              "    paying.lab('run', '-n', 2, 'sleep', '60', check=True)")
    started = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, start_new_session=True)
    place = Path(tempfile.gettempdir(), f"lab-{os.getuid()}-demo-{int(started.stdout.readline())}")
    time.sleep(1)
    assert place.exists()
    os.killpg(started.pid, how)  # as a terminal does
    started.wait(timeout=60)
    assert started.returncode and not place.exists()


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not say what its processors did")
def test_what_a_run_computes_is_not_others_doing(monkeypatch):
    before = paying.elsewhere()
    monkeypatch.setattr(paying.resource, "getrusage", lambda _: SimpleNamespace(ru_utime=8e5, ru_stime=2e5))
    assert 9.9e5 < before - paying.elsewhere() < 1.01e6
