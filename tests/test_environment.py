"""Set-up does nothing if the environment is ready, and reports each obstacle in one line."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BIN, ROOT, load_module, run_command

from cluster.launch import install_problem

SETUP = ROOT / "tools" / "environment" / "setup.py"
set_up = load_module(SETUP)
build_horovod = set_up.build_horovod


@pytest.fixture
def ready_venv(tmp_path, monkeypatch):
    """Return an empty virtual environment whose stamp says that it is ready."""
    for name in set_up.SITE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (venv / set_up.STAMP).write_text(set_up.stamp())
    (venv / set_up.AGREE_STAMP).write_text(set_up.agree_hash())
    return venv


def failing_setup_message(*flags, **options):
    """Return the only line that set-up prints when it fails, as it must here."""
    result = run_command([sys.executable, SETUP, *flags], **options)
    assert result.code == 1 and result.err.count("\n") == 1, result.err
    assert result.err.startswith("set-up failed: "), result.err
    return result.err


@pytest.mark.check
def test_setup_of_a_ready_environment_prints_nothing(ready_venv, tmp_path):
    venv = tmp_path / "a blank"
    venv.symlink_to(ready_venv)  # not to this environment: other pins would change it
    result = run_command(["make", "-s", "--no-print-directory", "setup", f"VENV={venv}"], cwd=ROOT)
    assert (result.code, result.out, result.err) == (0, "", "")


@pytest.mark.check
def test_another_site_or_a_failed_setup_is_not_ready(ready_venv, monkeypatch):
    assert set_up.ready(ready_venv)
    for name in set_up.SITE_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "another")
            assert not set_up.ready(ready_venv)
    (ready_venv / set_up.STAMP).write_text("other pins\nNCCL\ncc")
    monkeypatch.setattr(set_up, "make_venv", lambda *_: 1 / 0)
    with monkeypatch.context() as patch:
        patch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
        patch.setenv("SITE_MPICC", "cc")
        with pytest.raises(ZeroDivisionError):
            set_up.create_environment(ready_venv)
        assert not set_up.ready(ready_venv)
    set_up.restore_site(ready_venv)  # without the site file
    assert [os.environ.pop(name) for name in set_up.SITE_VARIABLES] == ["NCCL", "cc"]


@pytest.mark.fault
def test_a_new_environment_without_a_network_says_what_to_do(tmp_path):
    pip = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_EXTRA_INDEX_URL": "", "PIP_USER": "1",
           "PIP_FIND_LINKS": "", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    message = failing_setup_message("--venv", tmp_path / "venv", env=pip)
    assert "No matching distribution found for uv" in message and "https_proxy" in message
    assert not set_up.ready(tmp_path / "venv")


@pytest.mark.parametrize("python", [f"3.{minor}.0" for _, minor in (set_up.OLDEST, set_up.NEWEST)])
def test_requirements_match_pyproject(python):
    """uv resolves pyproject.toml's packages to these versions, without installing."""
    command = [BIN / "uv", "pip", "compile", "--quiet", "--system-certs",
               "--python", sys.executable, "--python-version", python, "--group", "tests",
               "--no-annotate", "--no-header", "-c", set_up.REQUIREMENTS, ROOT / "pyproject.toml"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    if "client error (Connect)" in result.stderr:
        pytest.skip("no network")
    assert result.returncode == 0, result.stderr
    pins = re.findall(r"^\S+==\S+", set_up.REQUIREMENTS.read_text(), re.M)
    assert set(result.stdout.split()) <= set(pins) and len(result.stdout.split()) > 100


@pytest.mark.check
def test_missing_tools_are_reported_before_set_up_starts(tmp_path, monkeypatch, capsys):
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
    """An older Python must be able to run setup.py as far as its version check."""
    for path in SETUP.parent.glob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 6))


@pytest.mark.check
def test_unknown_site_and_foreign_environment_are_refused(ready_venv, monkeypatch):
    result = run_command(["make", "setup", "SITE=atlantis"], cwd=ROOT)
    assert result.code != 0 and "there is no submit/sites/atlantis.sh" in result.err
    message = failing_setup_message("--venv", ready_venv, env={"SITE_MPICC": "cc"})
    assert "another folder with VENV=" in message
    monkeypatch.setattr(set_up, "may_write", lambda venv: False)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--venv", str(ready_venv)])
    set_up.main()  # a shared environment that is ready
    monkeypatch.setattr(set_up, "REQUIREMENTS", Path(os.devnull))
    with pytest.raises(SystemExit, match=r"^set-up failed: .* made with other pins.* its owner"):
        set_up.main()


@pytest.mark.fault
def test_failed_horovod_build_leaves_the_rest_working(ready_venv, tmp_path, monkeypatch):
    """First its source differs, then a compiler is missing, then the compiler is installed."""
    (tmp_path / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 20)")
    monkeypatch.setattr(build_horovod, "cache_key", lambda venv: "")
    monkeypatch.setattr(build_horovod, "build", lambda *_: build_horovod.change(tmp_path))
    monkeypatch.setattr(sys, "prefix", ready_venv)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for tools, reason in ([], "differs from version 0.28.1"), (["g++"], "apt install g++"):
        monkeypatch.setattr(
            build_horovod, "missing_build_tools", lambda include, tools=tools: tools)
        set_up.add_horovod(ready_venv, "")
        assert reason in install_problem("02_horovod") and install_problem("03_ddp") is None
        assert set_up.ready(ready_venv)
    monkeypatch.setattr(build_horovod, "missing_build_tools", lambda include: [])
    assert not set_up.ready(ready_venv)


@pytest.mark.check
def test_horovod_is_installed_if_it_can_be_built():
    """A failed build must not be taken for a missing compiler."""
    reason = install_problem("02_horovod")
    assert set_up.missing_compiler_message(Path(sys.prefix)) or not reason, reason
