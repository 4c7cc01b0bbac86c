"""Set-up does nothing if the environment is ready, and reports each obstacle in one line."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, load_module, run_command
from jupyterlab_server.settings_utils import get_settings

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
    assert set_up.has_packages(ready_venv)
    for name in set_up.SITE_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "another")
            assert not set_up.has_packages(ready_venv)
    monkeypatch.setattr(set_up, "make_venv", lambda *_: 1 / 0)
    (ready_venv / set_up.STAMP).write_text("other pins")
    with pytest.raises(ZeroDivisionError):
        set_up.set_up(ready_venv, packages_only=False)
    assert not set_up.has_packages(ready_venv)


@pytest.mark.check
@pytest.mark.parametrize(("plugin", "setting", "value"), [
    ("docmanager-extension:plugin", "autosave", False),
    ("apputils-extension:notification", "fetchNews", "false")])
def test_jupyterlab_saves_only_on_demand_and_shows_no_news(
        plugin, setting, value, tmp_path, monkeypatch):
    monkeypatch.setattr(set_up, "install", lambda *_: None)
    set_up.install_packages(tmp_path, mpicc=None)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path / "etc" / "jupyter"))
    schemas = Path(sys.prefix, "share", "jupyter", "lab", "schemas")
    settings, _ = get_settings("", schemas, tmp_path, schema_name=f"@jupyterlab/{plugin}")
    assert settings["schema"]["properties"][setting]["default"] == value


@pytest.mark.fault
def test_a_new_environment_without_a_network_says_what_to_do(tmp_path):
    pip = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_EXTRA_INDEX_URL": "", "PIP_USER": "1",
           "PIP_FIND_LINKS": "", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    message = failing_setup_message("--venv", tmp_path / "venv", env=pip)
    assert "No matching distribution found for uv" in message and "https_proxy" in message
    assert not set_up.has_packages(tmp_path / "venv")


@pytest.mark.check
def test_missing_tools_are_reported_before_set_up_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_horovod.os.path, "exists", lambda path: False)
    set_up.check_machine()
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr(set_up.importlib.util, "find_spec", lambda name: None)
    packages = r"apt install python3-venv g\+\+ make git python3-dev$"
    with pytest.raises(set_up.SetUpFailed, match=packages):
        set_up.check_machine()


@pytest.mark.check
def test_unknown_site_and_foreign_environment_are_refused(ready_venv):
    result = run_command(["make", "setup", "SITE=atlantis"], cwd=ROOT)
    assert result.code != 0 and "there is no submit/sites/atlantis.sh" in result.err
    message = failing_setup_message("--venv", ready_venv, env={"SITE_MPICC": "cc"})
    assert "another folder with VENV=" in message


@pytest.mark.fault
def test_failed_horovod_build_leaves_the_rest_working(ready_venv, tmp_path, monkeypatch):
    """Its source is not the one that the patches are for; it is not built again."""
    (tmp_path / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 20)")
    monkeypatch.setattr(build_horovod, "cache_key", lambda venv: "")
    monkeypatch.setattr(build_horovod, "build", lambda *_: build_horovod.patch(tmp_path))
    monkeypatch.setattr(sys, "prefix", ready_venv)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    set_up.add_horovod(ready_venv, "")
    assert "of version 0.28.1" in install_problem("02_horovod")
    assert install_problem("03_ddp") is None
    assert set_up.has_packages(ready_venv) and not set_up.should_build_horovod(ready_venv)
