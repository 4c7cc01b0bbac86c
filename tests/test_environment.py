"""Set-up: who calls it makes no difference, two at once make it once, and what is in its way is said in one line."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import build_horovod
import psutil
import pytest
import setup as set_up
from conftest import BIN, ON, PROGRAMS, ROOT, chapters, execute
from launch import missing

SETUP = ROOT / "tools" / "environment" / "setup.py"
OLD_PYTHON = """#!/bin/sh
exec '{python}' -c 'import runpy, sys
sys.version_info = (3, 7, 2, "final", 0)
del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""
PYTHONS = [f"3.{minor}.{patch}" for minor in range(set_up.OLDEST[1], set_up.NEWEST[1] + 1) for patch in (0, 99)]


BASE = os.path.realpath(sys.executable)  # what the environment was made from


def poor_path(folder, python=BASE):
    """A folder to be the whole PATH: a python3 that says of itself that it is 3.7, and no compiler."""
    folder.mkdir()
    (folder / "python3").write_text(OLD_PYTHON.format(python=python))
    (folder / "python3").chmod(0o755)
    for tool in "make", "bash", "sh", "awk", "git":
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """A virtual environment with nothing in it that says that it is ready."""
    for name in "HOROVOD_GPU_OPERATIONS", "SITE_MPICC":
        monkeypatch.delenv(name, raising=False)
    return make_venv(tmp_path / "venv")


def make_venv(venv, python=sys.executable):
    subprocess.run([python, "-m", "venv", "--without-pip", venv], check=True)
    (venv / set_up.STAMP).write_text("\n".join(set_up.stamp(venv)))
    return venv


def refused(*words, **options):
    """What set-up says when it ends with one line."""
    done = execute([sys.executable, SETUP, *words], **options)
    assert done.code == 1 and done.err.count("\n") == 1 and done.err.startswith("set-up failed: "), done.err
    return done.err


# Who calls

def test_nothing_to_do_is_said_by_silence_in_less_than_three_seconds_whoever_calls(tmp_path):
    for path in os.environ["PATH"], f"{BIN}:{os.environ['PATH']}", poor_path(tmp_path / "bin"):
        started = time.monotonic()
        words = ["make", "--silent", "--no-print-directory", "setup", f"VENV={sys.prefix}"]
        done = execute(words, cwd=ROOT, env={"PATH": str(path)})
        assert (done.code, done.out, done.err) == (0, "", "") and time.monotonic() - started < 3


def test_any_python_3_reads_it():
    for path in SETUP.parent.glob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 6))


def test_an_old_python_without_an_environment_is_told_what_to_do(tmp_path):
    done = execute([poor_path(tmp_path / "bin") / "python3", SETUP, "--venv", tmp_path / "venv"])
    assert done.code == 1 and done.err.count("\n") == 1 and "3.8 or newer: make PYTHON=" in done.err
    assert not (tmp_path / "venv").exists()


def test_pins_site_and_horovod_s_changes_are_what_the_stamp_holds(ready, monkeypatch):
    assert set_up.ready(ready)
    for name in "HOROVOD_GPU_OPERATIONS", "SITE_MPICC":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, "another")
            assert not set_up.ready(ready)
    monkeypatch.setattr(build_horovod, "CHANGES", [])
    assert not set_up.ready(ready)
    monkeypatch.undo()
    monkeypatch.setattr(set_up, "REQUIREMENTS", Path(os.devnull))
    assert not set_up.ready(ready)


def test_a_compiler_that_has_come_completes_an_environment_and_one_that_is_missing_changes_nothing(ready, monkeypatch):
    (ready / set_up.WITHOUT_HOROVOD).write_text(f"{set_up.NO_COMPILER}g++")
    monkeypatch.setattr(build_horovod, "lacking", lambda include: ["g++"])
    assert set_up.ready(ready)
    monkeypatch.setattr(build_horovod, "lacking", lambda include: [])
    assert not set_up.ready(ready)
    (ready / set_up.WITHOUT_HOROVOD).write_text("Horovod was not built")  # with a compiler: not tried again
    assert set_up.ready(ready)


def test_a_set_up_that_fails_half_way_is_not_taken_for_ready_and_keeps_what_the_site_file_said(ready, monkeypatch):
    (ready / set_up.STAMP).write_text("other pins\nNCCL\ncc")
    monkeypatch.setattr(set_up, "make_venv", lambda *_: 1 / 0)
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")  # which set-up sets, too
    with pytest.raises(ZeroDivisionError):
        set_up.make(ready)
    assert not set_up.ready(ready) and set_up.stamp(ready)[1:] == ("NCCL", "cc")


# What is in its way

def test_without_a_network_one_line_says_what_to_do(tmp_path):
    """A fresh environment that finds no package."""
    index = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "",
             "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    assert "https_proxy" in refused("--venv", tmp_path / "venv", env=index)
    assert not set_up.ready(tmp_path / "venv")


def test_a_package_that_this_python_has_no_wheel_of_is_named_in_one_line(tmp_path):
    name = "tensorflow_cpu-2.21.0-cp311-cp311-manylinux_2_27_x86_64.whl"
    (tmp_path / name).touch()
    with pytest.raises(set_up.SetUpFailed, match=r"(?s)^[^\n]*tensorflow-cpu==2.21.0[^\n]*3\.14[^\n]*$"):
        set_up.run([*set_up.installer(Path(sys.prefix)), "--no-index", "--find-links", tmp_path, "--dry-run",
                    "--python-version", "3.14", "--target", tmp_path, "tensorflow-cpu==2.21.0"], "advice")


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_are_a_whole_for_each_python(python):
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


def test_a_home_that_cannot_be_written_is_not_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    assert set_up.cache_of(tmp_path) == tmp_path / "cache" / "scaling-workshop"
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / "cache") and "cannot be written" in capsys.readouterr().out


def test_an_environment_whose_python_is_gone_is_made_again(ready):
    for link in (ready / "bin").glob("python*"):
        link.unlink()
    (ready / "bin" / "python").symlink_to("/no/such/python")
    set_up.make_venv(ready, "")
    assert set_up.ask(ready, "__import__('pip')")


def test_what_debian_lacks_is_one_line_before_anything_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_horovod.os.path, "exists", lambda path: False)
    set_up.look_around(tmp_path)
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr(set_up.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(set_up.SetUpFailed, match=r"apt install python3-venv g\+\+ make python3-dev$"):
        set_up.look_around(tmp_path)


def test_a_site_that_is_not_there_and_an_environment_of_another_site_are_refused(ready):
    done = execute(["make", "setup", "SITE=atlantis"], cwd=ROOT)
    assert done.code != 0 and "SITE=atlantis" in done.err
    assert "another place with VENV=" in refused("--venv", ready, env={"SITE_MPICC": "cc"})


# Another user

def as_nobody(words, cwd, path):
    return subprocess.run(["runuser", "-u", "nobody", "--", "env", "-i", f"PATH={path}", "HOME=/nonexistent", *words],
                          cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)


@pytest.fixture
def shared():
    """A folder that others may read: a checkout of nobody's, and nobody's poor PATH."""
    if os.getuid() != 0 or not shutil.which("runuser"):
        pytest.skip("to be another user needs root and runuser")
    python = "/usr/bin/python3"
    if as_nobody([python, "-c", ""], "/", "/usr/bin").returncode:
        pytest.skip(f"there is no {python}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        checkout = place / "checkout"
        shutil.copytree(ROOT / "tools", checkout / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        for name in "Makefile", "requirements.txt":
            shutil.copy(ROOT / name, checkout)
        poor_path(place / "bin", python)
        subprocess.run(["chown", "-R", "nobody", checkout], check=True)
        yield SimpleNamespace(place=place, checkout=checkout, python=python)


def test_another_user_with_an_old_python_and_no_compiler_takes_a_shared_environment(shared):
    venv = make_venv(shared.place / "venv", shared.python)
    words = ["make", "--silent", "--no-print-directory", "setup", f"VENV={venv}"]
    done = as_nobody(words, shared.checkout, shared.place / "bin")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    with open(shared.checkout / "requirements.txt", "a") as file:
        file.write("another==1.0\n")
    done = as_nobody(words, shared.checkout, shared.place / "bin")
    said, = [line for line in done.stderr.splitlines() if not line.startswith("make:")]
    assert done.returncode != 0 and done.stdout == ""
    assert "other pins" in said and "ask its owner" in said and "VENV=" in said


# Two at once

@pytest.mark.fault
def test_two_set_ups_of_one_environment_make_it_once(tmp_path):
    words = [sys.executable, PROGRAMS / "short_set_up.py", SETUP.parent, tmp_path / "venv", tmp_path / "go"]
    started = []
    try:
        for _ in range(2):
            started.append(subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            said = started[-1].stdout.readline()
        assert said == f"set-up: waits for another set-up, which works on {tmp_path}/venv\n"
        (tmp_path / "go").touch()
        ends = [process.communicate(timeout=60)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], ends
    finally:
        for process in started:
            process.kill()
    assert (tmp_path / "venv.log").read_text() == "made\n"


def test_a_set_up_that_is_ended_ends_what_it_has_started_and_the_next_one_goes_on(tmp_path):
    words = [sys.executable, PROGRAMS / "short_set_up.py", SETUP.parent, tmp_path / "venv", tmp_path / "go"]
    with subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            process.stdout.readline()  # it begins
            while not (pid := set_up.read(tmp_path / "venv.pid")).endswith("\n"):
                time.sleep(0.05)
            child = psutil.Process(int(pid))
            process.terminate()
            assert "interrupted" in process.communicate(timeout=20)[1] and process.returncode == 1
            with suppress(psutil.NoSuchProcess):
                assert child.wait(timeout=20) is None or not child.is_running()
        finally:
            process.kill()
    (tmp_path / "go").touch()
    assert execute(words).code == 0


# Horovod's wheel

@pytest.fixture
def bench(tmp_path, ready, monkeypatch):
    """An environment and a cache in which a build leaves a wheel at once, and nothing is installed."""
    found = SimpleNamespace(built=[], cache=tmp_path)

    def build(venv, folder):
        found.built.append(folder)
        folder.mkdir()
        (folder / "horovod.whl").touch()
    monkeypatch.setattr(build_horovod, "build", build)
    monkeypatch.setattr(build_horovod, "run", lambda *_, **__: None)
    monkeypatch.setattr(build_horovod, "key", lambda venv: os.environ.get("KEY", ""))
    found.install = lambda: build_horovod.install(ready, tmp_path)
    return found


def test_a_wheel_is_built_once_for_what_it_links_to(bench, monkeypatch):
    bench.install()
    bench.install()
    assert len(bench.built) == 1
    monkeypatch.setenv("KEY", "another")
    bench.install()
    assert len(bench.built) == 2


@chapters("02_horovod/pytorch")
def test_horovod_s_wheel_is_kept_under_all_that_goes_into_it(chapter, monkeypatch):
    keys = {build_horovod.key(Path(sys.prefix)), build_horovod.key(Path(sys.prefix))}
    assert len(keys) == 1
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    keys.add(build_horovod.key(Path(sys.prefix)))
    assert build_horovod.WITHOUT_CUDA[0] not in build_horovod.changes()
    monkeypatch.setattr(build_horovod, "SETTINGS", {})
    keys.add(build_horovod.key(Path(sys.prefix)))
    assert len(keys) == 3


def test_a_source_that_is_not_the_known_one_is_refused(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 20)")
    with pytest.raises(build_horovod.SetUpFailed, match=r"not that of 0\.28\.1"):
        build_horovod.change(tmp_path)


def test_horovod_is_there_where_it_can_be_built():
    """So that a build that fails is not taken for a missing compiler."""
    lacking = build_horovod.lacking(set_up.ask(Path(sys.prefix), set_up.INCLUDE))
    assert lacking or not missing("02_horovod/pytorch"), missing("02_horovod/pytorch")


def test_torchvision_is_mended_only_where_it_has_to_be():
    import torchvision

    text = Path(torchvision.extension.__file__).read_text()
    assert text.count(set_up.OPERATORS) == (not torchvision.extension._has_ops())


# Each Python that is found on this machine; only in `make test-all`, for Horovod is built for each

def python_of(version):
    found = subprocess.run([BIN / "uv", "python", "find", "--offline", version], capture_output=True, text=True)
    return found.stdout.strip() or None


@pytest.mark.parametrize("version", ["/usr/bin/python3", "3.12", "3.13", "3.14"])
@pytest.mark.timeout(1800)
def test_every_chapter_trains_and_resumes_on_each_python(version, tmp_path):
    python = python_of(version)
    if not python or not set_up.fits(map(int, set_up.ask(Path(python).parent.parent, "*sys.version_info[:2]").split())):
        pytest.skip(f"no {version} of 3.11 to 3.14 here")
    venv = tmp_path / "with a blank" / "venv"
    done = subprocess.run([python, SETUP, "--venv", venv], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0 and "left out" not in done.stdout, done.stdout + done.stderr
    for chapter, ranks in [*ON.items(), ("05_zero", 2), ("05_zero/fsdp.py", 2)]:
        main = ROOT / chapter if chapter.endswith(".py") else ROOT / chapter / "main.py"
        words = [venv / "bin/mpiexec", "-n", ranks, venv / "bin/python", main, "--checkpoint",
                 tmp_path / chapter.replace("/", "-"), "--epochs"]
        for flags in ["1"], ["2", "--resume"]:
            trained = execute([*words, *flags])
            assert trained.code == 0, (chapter, trained.err)
    shutil.rmtree(venv)
