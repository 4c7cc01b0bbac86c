"""Set-up: who calls it makes no difference, two at once make it once, and what is in its way is said in one line."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import build_horovod
import psutil
import pytest
import setup as set_up
from conftest import BIN, PROGRAMS, ROOT, execute

from submit.study import missing

SETUP = ROOT / "tools" / "environment" / "setup.py"
OLD_PYTHON = """#!/bin/sh
exec '{python}' -c 'import runpy, sys
sys.version_info = (3, 7, 2, "final", 0)
del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""


def poor_path(folder):
    """A folder to be the whole PATH: a python3 that says of itself that it is 3.7, and no compiler."""
    folder.mkdir()
    (folder / "python3").write_text(OLD_PYTHON.format(python=os.path.realpath(sys.executable)))
    (folder / "python3").chmod(0o755)
    for tool in "make", "bash", "sh", "awk", "git":
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """A virtual environment with nothing in it that says that it is ready."""
    for name in "HOROVOD_GPU_OPERATIONS", "SITE_MPICC":
        monkeypatch.delenv(name, raising=False)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (venv / set_up.STAMP).write_text("\n".join(set_up.stamp(venv)))
    return venv


def refused(*words, **options):
    """What set-up says when it ends with one line."""
    done = execute([sys.executable, SETUP, *words], **options)
    assert done.code == 1 and done.err.count("\n") == 1 and done.err.startswith("set-up failed: "), done.err
    return done.err


# Who calls

@pytest.mark.check
def test_nothing_to_do_is_said_by_silence_whoever_calls(tmp_path):
    (tmp_path / "a blank").symlink_to(sys.prefix)
    for path in os.environ["PATH"], poor_path(tmp_path / "bin"):
        words = ["make", "--silent", "--no-print-directory", "setup", f"VENV={tmp_path / 'a blank'}"]
        done = execute(words, cwd=ROOT, env={"PATH": str(path)})
        assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.check
def test_other_pins_or_another_site_are_something_to_do(ready, monkeypatch):
    assert set_up.ready(ready)
    for name in "HOROVOD_GPU_OPERATIONS", "SITE_MPICC":
        with monkeypatch.context() as patch:
            patch.setenv(name, "another")
            assert not set_up.ready(ready)
    monkeypatch.setattr(set_up, "REQUIREMENTS", Path(os.devnull))
    assert not set_up.ready(ready)


@pytest.mark.check
def test_a_set_up_that_fails_half_way_is_not_taken_for_ready_and_keeps_what_the_site_file_said(ready, monkeypatch):
    (ready / set_up.STAMP).write_text("other pins\nNCCL\ncc")
    monkeypatch.setattr(set_up, "make_venv", lambda *_: 1 / 0)
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")  # which set-up sets, too
    with pytest.raises(ZeroDivisionError):
        set_up.make(ready)
    assert not set_up.ready(ready) and set_up.stamp(ready)[1:] == ("NCCL", "cc")


@pytest.mark.check
@pytest.mark.parametrize(("python", "venv", "said"), [
    ("shared", "shared", "^$"), ("home", "shared", "its Python lies in .*home, .*PYTHON=/usr/bin/python3"),
    ("shared", "home", "other users may not enter .*home. To share it: chmod")])
def test_an_environment_that_others_cannot_use_is_told(python, venv, said, monkeypatch, capsys):
    """Its interpreter lies in a private home, or it does itself. (pytest's own folders are private.)"""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        for name, mode in ("shared", 0o755), ("home", 0o700):
            Path(place, name).mkdir()
            Path(place, name, "python3").touch()
            Path(place, name, "python3").chmod(0o755)
            Path(place, name).chmod(mode)
        monkeypatch.setattr(set_up, "ask", lambda *_: f"{place}/{python}/python3")
        set_up.look_at_sharing(Path(place, venv, "venv"))
    assert re.search(said, capsys.readouterr().out)


# What is in its way

@pytest.mark.check
def test_an_old_python_without_an_environment_is_told_what_to_do(tmp_path):
    done = execute([poor_path(tmp_path / "bin") / "python3", SETUP, "--venv", tmp_path / "venv"])
    assert done.code == 1 and done.err.count("\n") == 1 and "3.8 or newer: make PYTHON=" in done.err
    assert not (tmp_path / "venv").exists()


@pytest.mark.fault
def test_without_a_network_one_line_says_what_to_do(tmp_path):
    """A fresh environment that finds no package."""
    index = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "",
             "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    assert "https_proxy" in refused("--venv", tmp_path / "venv", env=index)
    assert not set_up.ready(tmp_path / "venv")


@pytest.mark.parametrize("python", [f"3.{minor}.0" for _, minor in (set_up.OLDEST, set_up.NEWEST)])
def test_the_pins_are_a_whole(python):
    """uv resolves them, and installs nothing."""
    words = [BIN / "uv", "pip", "compile", "--quiet", "--system-certs", "--python", sys.executable, "--python-version",
             python, "--group", "tests", "--no-annotate", "--no-header", "-c", set_up.REQUIREMENTS,
             ROOT / "pyproject.toml"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT)
    if "client error (Connect)" in done.stderr:
        pytest.skip("no network")
    assert done.returncode == 0, done.stderr
    pins = re.findall(r"^\S+==\S+", set_up.REQUIREMENTS.read_text(), re.M)
    assert set(done.stdout.split()) <= set(pins) and len(done.stdout.split()) > 100


@pytest.mark.check
def test_the_network_is_asked_only_where_a_package_of_the_tests_is_missing(monkeypatch):
    asked = []
    monkeypatch.setattr(set_up, "run", lambda words, *_, **options: asked.append(words[-1]))
    set_up.install_tests(Path(sys.prefix))
    assert len(asked) == 2 and set(asked) <= {"--offline", "--no-index"}


@pytest.mark.check
def test_what_debian_lacks_is_one_line_before_anything_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_horovod.os.path, "exists", lambda path: False)
    set_up.look_around()
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr(set_up.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(set_up.SetUpFailed, match=r"apt install python3-venv g\+\+ make python3-dev$"):
        set_up.look_around()


@pytest.mark.check
def test_a_site_that_is_not_there_and_an_environment_of_somebody_else_are_refused(ready, monkeypatch):
    done = execute(["make", "setup", "SITE=atlantis"], cwd=ROOT)
    assert done.code != 0 and "SITE=atlantis: there is no submit/sites/atlantis.sh" in done.err
    assert "another place with VENV=" in refused("--venv", ready, env={"SITE_MPICC": "cc"})
    monkeypatch.setattr(set_up, "may_write", lambda venv: False)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--venv", str(ready)])
    set_up.main()  # a shared environment of ours
    monkeypatch.setattr(set_up, "REQUIREMENTS", Path(os.devnull))
    with pytest.raises(SystemExit, match=r"^set-up failed: .* made with other pins.* ask its owner"):
        set_up.main()


# Two at once

@pytest.mark.fault
def test_two_set_ups_make_it_once_and_the_end_of_one_is_the_end_of_what_it_started(tmp_path):
    venv = tmp_path / "a blank" / "venv"
    words = [sys.executable, PROGRAMS / "short_set_up.py", SETUP.parent, venv, tmp_path / "go"]
    started = []
    try:
        for _ in range(2):
            started.append(subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            said = started[-1].stdout.readline()
        assert said == f"set-up: waits for another set-up, which works on {venv}\n"
        while not (pid := set_up.read(Path(f"{venv}.pid"))).endswith("\n"):
            time.sleep(0.05)
        child = psutil.Process(int(pid))
        started[0].terminate()
        assert "interrupted; make setup goes on" in started[0].communicate(timeout=60)[0]
        assert psutil.wait_procs([child], timeout=20)[1] == []
        (tmp_path / "go").touch()
        said = started[1].communicate(timeout=60)[0]
        assert [process.returncode for process in started] == [1, 0], said
    finally:
        for process in started:
            process.kill()
    assert execute(words).code == 0 and Path(f"{venv}.log").read_text() == "made\n" * 2, "the third finds it ready"


# Horovod

@pytest.mark.fault
def test_a_horovod_that_does_not_build_leaves_the_rest_working(ready, tmp_path, monkeypatch, capsys):
    """Its source is not the known one. A compiler that comes later completes the environment."""
    (tmp_path / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 20)")
    monkeypatch.setattr(build_horovod, "key", lambda venv: "")
    monkeypatch.setattr(build_horovod, "build", lambda venv, folder: build_horovod.change(tmp_path))
    monkeypatch.setattr(build_horovod, "lacking", lambda include: [])
    set_up.add_horovod(ready, tmp_path, "")
    assert "chapter 2 is left out, the others work: CMakeLists.txt" in capsys.readouterr().out
    assert set_up.ready(ready)
    monkeypatch.setattr(sys, "prefix", ready)
    assert "not that of 0.28.1" in missing("02_horovod/pytorch") and missing("03_ddp") is None
    monkeypatch.setattr(build_horovod, "lacking", lambda include: ["g++"])
    set_up.add_horovod(ready, tmp_path, "")
    assert "apt install g++" in missing("02_horovod/pytorch") and set_up.ready(ready)
    monkeypatch.setattr(build_horovod, "lacking", lambda include: [])
    assert not set_up.ready(ready)


@pytest.mark.check
def test_horovod_is_there_where_it_can_be_built():
    """So that a build that fails is not taken for a missing compiler."""
    lacking = build_horovod.lacking(set_up.ask(Path(sys.prefix), set_up.INCLUDE))
    assert lacking or not missing("02_horovod/pytorch"), missing("02_horovod/pytorch")
