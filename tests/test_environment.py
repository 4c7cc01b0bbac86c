"""Set-up does nothing if it is done, and reports every obstacle in one line."""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import BIN, ROOT, execute, load_module

from submit.study import missing

SETUP = ROOT / "tools" / "environment" / "setup.py"
set_up = load_module(SETUP)
build_horovod = set_up.build_horovod


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """An empty virtual environment whose stamp says that it is ready."""
    for name in "HOROVOD_GPU_OPERATIONS", "SITE_MPICC":
        monkeypatch.delenv(name, raising=False)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (venv / set_up.STAMP).write_text("\n".join(set_up.stamp(venv)))
    return venv


def refused(*words, **options):
    """Run set-up, assert that it fails with one line, and return that line."""
    done = execute([sys.executable, SETUP, *words], **options)
    assert done.code == 1 and done.err.count("\n") == 1, done.err
    assert done.err.startswith("set-up failed: "), done.err
    return done.err


# What needs to be done

@pytest.mark.check
def test_nothing_to_do_is_silent(tmp_path):
    venv = tmp_path / "a blank"
    venv.symlink_to(sys.prefix)
    done = execute(["make", "--silent", "--no-print-directory", "setup", f"VENV={venv}"], cwd=ROOT)
    assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.check
def test_new_site_or_failed_set_up_is_not_ready(ready, monkeypatch):
    assert set_up.ready(ready)
    for name in "HOROVOD_GPU_OPERATIONS", "SITE_MPICC":
        with monkeypatch.context() as patch:
            patch.setenv(name, "another")
            assert not set_up.ready(ready)
    (ready / set_up.STAMP).write_text("other pins\nNCCL\ncc")
    monkeypatch.setattr(set_up, "make_venv", lambda *_: 1 / 0)
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")  # which set-up sets, too
    with pytest.raises(ZeroDivisionError):
        set_up.create_environment(ready)
    assert not set_up.ready(ready) and set_up.stamp(ready)[1:] == ("NCCL", "cc")


@pytest.mark.check
def test_a_private_home_is_closed_to_others():
    """An environment in it, or whose Python is in it, cannot be shared: set-up says so."""
    with tempfile.TemporaryDirectory() as home:  # pytest's own folders are private
        for mode, closed in (0o755, None), (0o700, Path(os.path.realpath(home))):
            os.chmod(home, mode)
            assert set_up.closed_to_others(Path(home, "venv")) == closed


# Obstacles

@pytest.mark.fault
def test_without_a_network_one_line_says_what_to_do(tmp_path):
    """A new environment without access to packages."""
    index = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_EXTRA_INDEX_URL": "",
             "PIP_FIND_LINKS": "", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    assert "https_proxy" in refused("--venv", tmp_path / "venv", env=index)
    assert not set_up.ready(tmp_path / "venv")


@pytest.mark.parametrize("python", [f"3.{minor}.0" for _, minor in (set_up.OLDEST, set_up.NEWEST)])
def test_requirements_match_pyproject(python):
    """uv resolves pyproject.toml's packages to these versions, without installing."""
    words = [BIN / "uv", "pip", "compile", "--quiet", "--system-certs", "--python", sys.executable,
             "--python-version", python, "--group", "tests", "--no-annotate", "--no-header",
             "-c", set_up.REQUIREMENTS, ROOT / "pyproject.toml"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT)
    if "client error (Connect)" in done.stderr:
        pytest.skip("no network")
    assert done.returncode == 0, done.stderr
    pins = re.findall(r"^\S+==\S+", set_up.REQUIREMENTS.read_text(), re.M)
    assert set(done.stdout.split()) <= set(pins) and len(done.stdout.split()) > 100


@pytest.mark.check
def test_missing_tools_are_reported_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_horovod.os.path, "exists", lambda path: False)
    set_up.check_machine()
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr(set_up.importlib.util, "find_spec", lambda name: None)
    packages = r"apt install python3-venv g\+\+ make python3-dev$"
    with pytest.raises(set_up.SetUpFailed, match=packages):
        set_up.check_machine()
    monkeypatch.setattr(sys, "version_info", (3, 7, 2))
    with pytest.raises(set_up.SetUpFailed, match="is required; run make setup PYTHON="):
        set_up.check_machine()


@pytest.mark.check
def test_setup_parses_on_python_3_6():
    """Older Pythons must be able to run setup.py as far as its version check."""
    for path in SETUP.parent.glob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 6))


@pytest.mark.check
def test_unknown_site_and_foreign_environment_are_refused(ready, monkeypatch):
    done = execute(["make", "setup", "SITE=atlantis"], cwd=ROOT)
    assert done.code != 0 and "there is no submit/sites/atlantis.sh" in done.err
    assert "another folder with VENV=" in refused("--venv", ready, env={"SITE_MPICC": "cc"})
    monkeypatch.setattr(set_up, "may_write", lambda venv: False)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--venv", str(ready)])
    set_up.main()  # a shared environment that is ready
    monkeypatch.setattr(set_up, "REQUIREMENTS", Path(os.devnull))
    with pytest.raises(SystemExit, match=r"^set-up failed: .* made with other pins.* its owner"):
        set_up.main()


# Horovod

@pytest.mark.fault
def test_failed_horovod_build_leaves_the_rest_working(ready, tmp_path, monkeypatch):
    """Its source has changed. A compiler installed later completes the environment."""
    (tmp_path / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 20)")
    monkeypatch.setattr(build_horovod, "cache_key", lambda venv: "")
    monkeypatch.setattr(build_horovod, "build", lambda *_: build_horovod.change(tmp_path))
    monkeypatch.setattr(sys, "prefix", ready)
    for lacks, reason in ([], "differs from version 0.28.1"), (["g++"], "apt install g++"):
        monkeypatch.setattr(
            build_horovod, "missing_build_tools", lambda include, lacks=lacks: lacks)
        set_up.add_horovod(ready, tmp_path, "")
        assert reason in missing("02_horovod/pytorch") and missing("03_ddp") is None
        assert set_up.ready(ready)
    monkeypatch.setattr(build_horovod, "missing_build_tools", lambda include: [])
    assert not set_up.ready(ready)


@pytest.mark.check
def test_horovod_is_installed_if_it_can_be_built():
    """A failed build must not pass for a missing compiler."""
    headers = set_up.evaluate_in(Path(sys.prefix), set_up.INCLUDE_FOLDER_CODE)
    reason = missing("02_horovod/pytorch")
    assert build_horovod.missing_build_tools(headers) or not reason, reason
