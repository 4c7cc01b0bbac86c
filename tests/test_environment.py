"""Set-up does nothing if the environment is ready, and reports each obstacle in one line."""

import os
import shutil
import socket
import subprocess
import sys
import time
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


@pytest.fixture
def clone(tmp_path):
    """Return a folder with the files that `make setup` reads."""
    folder = tmp_path / "a clone"
    for name in ("Makefile", "pyproject.toml", "requirements.txt", "agree", "tools/environment"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, folder / name)
    return folder


@pytest.mark.check
def test_ready_environment_elsewhere_is_linked_once(clone, ready_venv):
    ready_venv.chmod(0o555)  # somebody else's

    def make_setup(venv):
        result = run_command(["make", "-s", "--no-print-directory", "setup", f"VENV={venv}"],
                             cwd=clone)
        assert (result.code, result.err) == (0, "")
        return result.out

    assert "linked .venv to " in make_setup(ready_venv)
    assert (clone / ".venv").samefile(ready_venv)
    assert make_setup(ready_venv) == make_setup(".venv") == ""
    new_place = ready_venv.with_name("a blank")
    ready_venv.rename(new_place)
    result = run_command(["make", "setup"], cwd=clone)
    assert result.code != 0 and f".venv leads to {ready_venv}, which does not exist" in result.err
    assert "linked .venv to " in make_setup(new_place)
    shutil.copytree(new_place, ready_venv, symlinks=True)
    result = run_command(["make", "setup", f"VENV={ready_venv}"], cwd=clone)
    assert result.code == 0 and ".venv stays as it is" in result.err
    assert (clone / ".venv").samefile(new_place)


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
    for name in "is_without_gpu", "install_with_cpu_build":
        monkeypatch.setattr(set_up, name, lambda *_: True)
    set_up.install_packages(tmp_path, mpicc=None)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path / "etc" / "jupyter"))
    schemas = Path(sys.prefix, "share", "jupyter", "lab", "schemas")
    settings, _ = get_settings("", schemas, tmp_path, schema_name=f"@jupyterlab/{plugin}")
    assert settings["schema"]["properties"][setting]["default"] == value


@pytest.mark.fault
def test_a_new_environment_without_a_network_says_what_to_do(tmp_path):
    pip = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_EXTRA_INDEX_URL": "", "PIP_USER": "1",
           "PIP_FIND_LINKS": "", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null",
           "UV_CACHE_DIR": str(tmp_path)}
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
    python = ready_venv / "bin/python"
    python.unlink()
    python.symlink_to("/nowhere")  # as if in another user's home
    assert "leads to /nowhere: " in failing_setup_message("--venv", ready_venv)


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


@pytest.mark.check
def test_pytorch_for_cpus_where_no_gpu_can_be(monkeypatch):
    def is_without(variable="HOME", command="", file="", platform="linux"):
        with monkeypatch.context() as patch:
            for name in ("SITE", "SITE_MPICC", "UV_TORCH_BACKEND", "MODULESHOME"):
                patch.delenv(name, raising=False)
            patch.setenv(variable, "x")
            patch.setattr(set_up.shutil, "which", lambda name: name == command)
            patch.setattr(os.path, "exists", lambda name: name == file)
            patch.setattr(sys, "platform", platform)
            return set_up.is_without_gpu()

    assert is_without() and not is_without(platform="darwin")
    assert not is_without(variable="SITE") and not is_without(variable="MODULESHOME")
    assert not is_without(command="nvidia-smi") and not is_without(command="sbatch")
    assert not is_without(file="/proc/driver/nvidia")


def test_index_of_cpu_builds_is_asked_for_five_seconds(tmp_path, monkeypatch):
    """The server accepts and never answers; then there is none, and uv names what it asked for."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (venv / "bin/uv").symlink_to(f"{sys.prefix}/bin/uv")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        assert not set_up.has_cpu_build(venv)
        assert time.monotonic() - start < 20  # seconds; uv alone waits for minutes
    with pytest.raises(set_up.SetUpFailed, match=r"download\.pytorch\.org/whl/cpu/torch"):
        set_up.install(venv, *set_up.CPU_BUILD, "--dry-run", "torch", **set_up.SHORT_WAIT)


@pytest.mark.check
def test_failed_download_of_the_cpu_build_installs_the_other(ready_venv, monkeypatch):
    calls = []

    def install(venv, *arguments, **_):
        calls.append(arguments)
        if "--dry-run" not in arguments and ("cpu" in arguments or "--offline" in arguments):
            raise set_up.SetUpFailed("404")

    monkeypatch.setattr(set_up, "install", install)
    monkeypatch.setattr(set_up, "is_without_gpu", lambda: True)
    set_up.install_packages(ready_venv, "")
    assert ["cpu" in arguments for arguments in calls] == [True, True, True, False, False]
    assert calls[2][2:] == calls[-1]
    calls.clear()
    monkeypatch.setattr(set_up, "evaluate_in", lambda *_: "2.14.1")  # an older set-up's build
    set_up.install_packages(ready_venv, "")
    assert not any("cpu" in arguments for arguments in calls)


@pytest.mark.check
def test_horovod_is_kept_for_each_build_of_pytorch(ready_venv, monkeypatch):
    keys = set()
    for packages in (b"torch==2.14.1", b"torch==2.14.1+cpu"):
        monkeypatch.setattr(build_horovod.subprocess, "check_output",
                            lambda command, output=packages: output)
        keys.add(build_horovod.cache_key(ready_venv))
    assert len(keys) == 2
