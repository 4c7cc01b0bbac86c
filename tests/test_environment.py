"""The environment is its own: who calls set-up makes no difference, two at once make it once, others write nothing."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import build_horovod
import environment
import indirect_pins
import psutil
import pytest
from conftest import BIN, PROGRAMS, ROOT, chapters, execute, load_module
from faults import fault
from launch import missing

SETUP = ROOT / "tools" / "environment" / "setup.py"
BASE = os.path.realpath(sys.executable)  # what the environment was made from
# A python3 that says of itself that it is 3.9; handing over to the environment's own Python ends that.
OLD_PYTHON = """#!/bin/sh
exec '{python}' -c 'import runpy, sys
sys.version_info = (3, 9, 2, "final", 0)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""
TOOLS = ("make", "bash", "sh", "awk", "git")  # no compiler


def poor_path(folder, python=BASE):
    """A folder to be the whole PATH: an old python3 and no compiler."""
    folder.mkdir()
    (folder / "python3").write_text(OLD_PYTHON.format(python=python))
    (folder / "python3").chmod(0o755)
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def set_up(venv, **options):
    return execute([sys.executable, SETUP, "--venv", venv], timeout=60, **options)


def make_venv(venv, python=sys.executable, stamp=environment.STAMP):
    """A virtual environment with nothing in it that says that it is ready."""
    subprocess.run([python, "-m", "venv", "--without-pip", venv], check=True)
    ask = "import sys; sys.path.insert(0, sys.argv[1]); import environment; print(environment.stamp('', ''), end='')"
    (venv / stamp).write_text(subprocess.run([venv / "bin" / "python", "-c", ask, SETUP.parent], check=True, text=True,
                                             capture_output=True).stdout)
    return venv


@pytest.fixture
def ready(tmp_path, monkeypatch):
    for name in "HOROVOD_GPU_OPERATIONS", "SITE_MPICC":
        monkeypatch.delenv(name, raising=False)
    return make_venv(tmp_path / "venv")


def contents(folder):
    """All files of a folder, with when each was changed."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


# Who calls

def test_nothing_to_do_is_said_by_silence_in_less_than_two_seconds_whoever_calls(tmp_path):
    stamp = Path(sys.prefix, environment.STAMP)
    before = stamp.stat().st_mtime_ns, stamp.read_text()
    for path in os.environ["PATH"], f"{BIN}:{os.environ['PATH']}", poor_path(tmp_path / "bin"):
        seconds = []
        for _ in range(2):
            started = time.monotonic()
            done = execute(["make", "--silent", "setup", f"VENV={sys.prefix}"], cwd=ROOT, env={"PATH": str(path)})
            seconds.append(time.monotonic() - started)
            assert (done.code, done.out, done.err) == (0, "", "")
        assert min(seconds) < 2
    assert before == (stamp.stat().st_mtime_ns, stamp.read_text())


def test_what_any_python_reads_first_is_in_its_words():
    for name in "setup.py", "c++17.sh":
        assert (SETUP.parent / name).exists()
    ast.parse(SETUP.read_text(), feature_version=(3, 6))
    imports = {alias.name for node in ast.parse(SETUP.read_text()).body if isinstance(node, ast.Import)
               for alias in node.names}
    assert imports <= {"argparse", "os", "signal", "subprocess", "sys"}


def test_an_old_python_without_an_environment_is_told_what_to_do(tmp_path):
    done = execute([poor_path(tmp_path / "bin") / "python3", SETUP, "--venv", tmp_path / "venv"])
    assert done.code == 1 and done.err.count("\n") == 1 and "Python 3.9" in done.err and "PYTHON=" in done.err
    assert not (tmp_path / "venv").exists()


def test_a_python_that_is_gone_is_told(ready):
    (ready / "bin" / "python").unlink()
    (ready / "bin" / "python").symlink_to("/no/such/python")
    done = set_up(ready)
    assert done.code == 1 and done.err.count("\n") == 1 and f"remove {ready}" in done.err


def test_pins_site_and_recipe_are_what_the_stamp_holds(tmp_path, monkeypatch):
    before = environment.stamp("", "")
    assert environment.stamp("NCCL", "") != before != environment.stamp("", "cc")
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler
    assert environment.stamp("", "") == before
    text, changed = environment.REQUIREMENTS.read_text(), tmp_path / "requirements.txt"
    monkeypatch.setattr(environment, "REQUIREMENTS", changed)
    changed.write_text("# another comment\n" + text)
    assert environment.stamp("", "") == before
    changed.write_text(text.replace("tqdm==", "tqdm==9"))
    assert environment.stamp("", "") != before
    monkeypatch.undo()
    monkeypatch.setattr(environment, "RECIPE", 0)
    assert environment.stamp("", "") != before


def wheel(folder, name, version, *requires):
    """An empty package that pip can resolve."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        needs = "".join(f"Requires-Dist: {other}\n" for other in requires)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_what_the_direct_pins_bring_along_is_written_below_them(tmp_path, monkeypatch):
    wheel(tmp_path, "torch", "1.0+cpu", "Brought_Along<3", "nvidia_something")
    wheel(tmp_path, "pytest", "1.0", "brought_along", "pluggy")
    for name in "Brought_Along-2.0", "Brought_Along-3.0", "nvidia_something-1.0", "pluggy-1.5":
        wheel(tmp_path, *name.split("-"))
    pins = tmp_path / "requirements.txt"
    head = '# What is imported\ntorch==1.0\n# The tests\npytest==1.0; extra == "tests"\n'
    pins.write_text(f"{head}{indirect_pins.HEADING}old==1.0\n")
    monkeypatch.setattr(environment, "REQUIREMENTS", pins)
    for name, value in ("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path)), ("CONFIG_FILE", os.devnull):
        monkeypatch.setenv(f"PIP_{name}", value)
    indirect_pins.main()
    assert pins.read_text() == f'{head}{indirect_pins.HEADING}brought-along==2.0\npluggy==1.5; extra == "tests"\n'
    pins.write_text(pins.read_text().replace("torch==1.0", "torch==9.0"))
    with pytest.raises(SystemExit, match=r"requirements\.txt is as it was"):
        indirect_pins.main()


def test_a_compiler_that_has_come_completes_an_environment_and_one_that_is_missing_changes_nothing(ready, monkeypatch):
    monkeypatch.setattr(build_horovod, "compiler", lambda: None)
    assert environment.to_do(ready) is None
    (ready / environment.WITHOUT_HOROVOD).write_text(build_horovod.NO_COMPILER)
    assert environment.to_do(ready) is None
    monkeypatch.setattr(build_horovod, "compiler", lambda: "g++")
    assert environment.to_do(ready) == environment.HOROVOD_MISSING
    monkeypatch.setattr(environment, "may_write", lambda venv: False)
    assert environment.to_do(ready) is None
    (ready / environment.WITHOUT_HOROVOD).write_text("Horovod was not built")  # with a compiler: not tried again
    monkeypatch.undo()
    assert environment.to_do(ready) is None


def test_a_set_up_that_fails_half_way_is_not_taken_for_ready(ready, monkeypatch):
    """Not even by a checkout with the pins that were there before; and what the site file said is kept."""
    (ready / environment.STAMP).write_text("other pins\nNCCL\ncc\n3.11")
    monkeypatch.setattr(environment, "make_venv", lambda *_: environment.fail("no network"))
    with pytest.raises(SystemExit, match="no network"):
        environment.make(ready)
    assert (ready / environment.STAMP).read_text() == "unfinished\nNCCL\ncc"
    assert "not ready" in environment.to_do(ready) and environment.site_of(ready) == ("NCCL", "cc")


def test_setup_says_what_to_do_without_a_network(tmp_path):
    """A fresh environment that finds no package."""
    index = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "",
             "PIP_RETRIES": "0", "PIP_CONFIG_FILE": "/dev/null"}
    done = set_up(tmp_path / "venv", env=index)
    assert done.code == 1 and "set-up failed" in done.err and "https_proxy" in done.err, done.err
    assert "Traceback" not in done.err and "not ready" in environment.to_do(tmp_path / "venv")


def test_setup_refuses_a_site_that_is_not_there():
    done = execute(["make", "setup", "SITE=atlantis"], cwd=ROOT)
    assert done.code != 0 and "SITE=atlantis" in done.err


def test_a_site_s_environment_is_not_filled_with_a_laptop_s_packages(ready):
    (ready / environment.STAMP).unlink()
    (ready / "constraints.txt").touch()
    done = set_up(ready)
    assert done.code == 1 and "SITE=NAME" in done.err and not (ready / environment.STAMP).exists()


def test_what_the_site_s_python_has_is_not_what_the_environment_has():
    """The environment's own Python sees both."""
    every = environment.site_requirements(Path("/elsewhere"))
    assert "torch==" not in every[0] and re.search("^torch==", every[1], re.M)
    ours, theirs = environment.site_requirements(Path(sys.prefix))
    if "torch==" not in theirs:  # else this environment is a site's
        assert re.search("^torch==", ours, re.M) and not re.search("^(mpi4py|mpich)==", ours, re.M)


# Another user

def as_nobody(words, cwd, path):
    return subprocess.run(["runuser", "-u", "nobody", "--", "env", "-i", f"PATH={path}", "HOME=/nonexistent", *words],
                          cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)


@pytest.fixture
def shared():
    """A folder that others may read: a checkout of nobody's, with a demo of one run, and nobody's poor PATH."""
    if os.getuid() != 0 or not shutil.which("runuser"):
        pytest.skip("to be another user needs root and runuser")
    python = "/usr/bin/python3"
    new = "import sys; sys.exit(sys.version_info < (3, 11))"
    if as_nobody([python, "-c", new], "/", "/usr/bin").returncode:
        pytest.skip(f"{python} is no Python 3.11 that another user may start")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        checkout = place / "checkout"
        for name in "submit", "tools", "03_ddp":
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for name in "Makefile", "requirements.txt":
            shutil.copy(ROOT / name, checkout)
        demo = checkout / "tools" / "measuring" / "demo.py"
        text = re.sub(r"^RUNS = .*?\]\s*#.*?\n", 'RUNS = [("03_ddp", 2)]\n', demo.read_text(),
                      flags=re.M | re.S)
        demo.write_text(text)
        weak = checkout / "tools" / "measuring" / "paying.py"
        weak.write_text(re.sub(r"^RUNS = .*$", "RUNS = []", weak.read_text(), flags=re.M))
        poor_path(place / "bin", python)
        subprocess.run(["chown", "-R", "nobody", checkout], check=True)
        yield SimpleNamespace(place=place, checkout=checkout, python=python)


def test_another_user_with_an_old_python_and_no_compiler_takes_a_shared_environment(shared):
    venv = make_venv(shared.place / "venv", shared.python)
    words = ["make", "--silent", "setup", f"VENV={venv}"]
    before = contents(venv)
    done = as_nobody(words, shared.checkout, shared.place / "bin")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    pins = shared.checkout / "requirements.txt"
    pins.write_text(pins.read_text().replace("tqdm==", "tqdm==9"))
    done = as_nobody(words, shared.checkout, shared.place / "bin")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make:")]
    assert done.returncode != 0 and len(said) == 1 and done.stdout == ""
    assert "other pins" in said[0] and "ask its owner" in said[0] and "VENV=" in said[0]
    assert contents(venv) == before


def test_another_user_s_demo_in_a_shared_environment(shared):
    """In the real environment; one run of the demo's sixteen."""
    path = shared.place / "bin"
    if as_nobody([sys.executable, "-c", ""], "/", path).returncode:
        pytest.skip(f"{sys.prefix}, or the Python that it was made from, is not for another user to read")
    assert not Path(sys.prefix).stat().st_mode & 0o002, "everybody may write there, and this shows nothing"
    done = as_nobody(["make", "--silent", "demo", f"VENV={sys.prefix}"], shared.checkout, path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ *03_ddp +2 ", done.stdout, re.M)
    assert (shared.checkout / "results" / "demo.png").exists()


# Two at once



def both_end_well(first, second, go, env=None):
    """Start one when the other is in the midst of its work; let it go on when somebody waits. Returns what he says."""
    started = []
    try:
        for words in first, second:
            started.append(subprocess.Popen([str(word) for word in words], env=os.environ | (env or {}), text=True,
                                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            said = started[-1].stdout.readline()
        go.touch()
        ends = [process.communicate(timeout=60)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], ends
        return said + ends[1]
    finally:
        for process in started:
            process.kill()
            process.wait()


@fault("many at once", "2 set-ups of one environment")
def test_two_set_ups_of_one_environment_make_it_once(tmp_path):
    words = [sys.executable, PROGRAMS / "short_set_up.py", SETUP.parent, tmp_path / "venv", tmp_path / "go"]
    printed = both_end_well(words, words, tmp_path / "go")
    assert (tmp_path / "venv.log").read_text() == "made\n"
    assert re.fullmatch(rf"set-up: waits for process \d+ of \S+ on \S+, since \d\S+ [\d:]+, which works on "
                        rf"{tmp_path}/venv\n", printed)


def test_the_lock_ends_with_who_holds_it(tmp_path):
    words = [sys.executable, PROGRAMS / "held_lock.py", SETUP.parent, tmp_path / "lock"]
    first = subprocess.Popen([*words, "100"], stdout=subprocess.PIPE, text=True)
    second = None
    try:
        assert first.stdout.readline() == "held False\n"
        second = subprocess.Popen([*words, "0"], stdout=subprocess.PIPE, text=True)
        assert f"process {first.pid} of " in second.stdout.readline()
        first.send_signal(signal.SIGKILL)
        assert second.communicate(timeout=20)[0] == "held True\n"
    finally:
        for process in (first, second):
            if process:
                process.kill()
                process.wait()


def test_a_set_up_that_is_ended_ends_its_pip(ready):
    """With a stand-in for pip."""
    packages, = (ready / "lib").glob("python*/site-packages")
    (packages / "pip").mkdir()
    (packages / "pip" / "__init__.py").touch()
    (packages / "pip" / "__main__.py").write_text("import os, time\nprint('pip', os.getpid(), flush=True)\n"
                                                  "time.sleep(100)")
    (ready / environment.STAMP).unlink()
    process = subprocess.Popen([sys.executable, SETUP, "--venv", ready], text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    try:
        pip = psutil.Process(next(int(line.split()[1]) for line in process.stdout if line.startswith("pip")))
        process.terminate()
        assert "interrupted" in process.communicate(timeout=20)[1] and process.returncode == 1
        with suppress(psutil.NoSuchProcess):
            assert pip.status() == psutil.STATUS_ZOMBIE
    finally:
        process.kill()
        process.wait()


def test_a_file_system_without_locks_is_named_and_does_not_stop_set_up(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(95, "Operation not supported")
    monkeypatch.setattr(environment.one_at_a_time.fcntl, "flock", refuse)
    with environment.one_at_a_time.alone(tmp_path / "lock", tmp_path) as waited:
        assert not waited
    assert "Operation not supported" in capsys.readouterr().out


# Horovod's wheel

PIN = "horovod==0.28.1"


def test_two_set_ups_that_share_a_cache_build_horovod_once(tmp_path):
    venvs = [make_venv(tmp_path / name) for name in ("one", "two")]
    starts = [[sys.executable, PROGRAMS / "short_build.py", SETUP.parent, venv, tmp_path / "log", tmp_path / "go"]
              for venv in venvs]
    printed = both_end_well(*starts, tmp_path / "go", {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert (tmp_path / "log").read_text() == "built\n"
    assert re.search(r"waits for process \d+ of .*/cache/scaling-workshop/horovod-0\.28\.1-\w+\n.*Horovod's wheel of",
                     printed)


@pytest.fixture
def bench(tmp_path, ready, monkeypatch):
    """An environment and a cache in which a build leaves a wheel at once; .run is what succeeds() is asked to do."""
    found = SimpleNamespace(venv=ready, cache=tmp_path / "cache" / "scaling-workshop", built=[], commands=[], fails="")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build_horovod, "compiler", lambda: "true")
    monkeypatch.setattr(build_horovod, "VERSIONS", "print(1)")

    def build(venv, pin, folder):
        found.built.append(folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        (folder / "horovod.whl").write_text("new")

    def succeeds(command):
        found.commands.append(command)
        return not found.fails or found.fails not in map(str, command)
    monkeypatch.setattr(build_horovod, "build", build)
    monkeypatch.setattr(build_horovod, "succeeds", succeeds)
    found.install = lambda: build_horovod.install(ready, PIN)
    return found


def test_a_wheel_is_kept_when_only_two_ranks_fail_and_not_when_it_does_not_install(bench):
    bench.fails = "-n"
    with pytest.raises(build_horovod.BuildError, match="does not all-reduce"):
        bench.install()
    folder, = bench.built
    assert (folder / "horovod.whl").exists()
    bench.fails = ""
    bench.install()
    assert len(bench.built) == 1
    bench.fails = "pip"
    with pytest.raises(build_horovod.BuildError, match="does not install"):
        bench.install()
    assert not folder.exists()


@pytest.mark.parametrize("wheels", [[], ["one.whl", "two.whl"]], ids=["none", "two"])
def test_a_folder_without_its_one_wheel_is_built_again(bench, wheels):
    bench.install()
    folder, = bench.built
    for path in folder.iterdir():
        path.unlink()
    for name in wheels:
        (folder / name).touch(mode=0o644)
    bench.install()
    assert len(bench.built) == 2 and [path.name for path in folder.iterdir()] == ["horovod.whl"]


def test_a_build_that_leaves_no_wheel_is_one_line(bench, monkeypatch):
    monkeypatch.setattr(build_horovod, "build", lambda venv, pin, folder: folder.mkdir())
    with pytest.raises(build_horovod.BuildError, match="0 wheels"):
        bench.install()


@pytest.mark.parametrize("spoil", ["cache", "folder", "wheel", "owner"])
def test_a_cache_that_others_may_write_is_not_used(bench, capsys, spoil):
    bench.install()
    folder, = bench.built
    path = {"cache": bench.cache, "folder": folder, "wheel": folder / "horovod.whl", "owner": folder}[spoil]
    if spoil == "owner":
        if os.getuid() != 0:
            pytest.skip("to give a file away needs root")
        shutil.chown(path, "nobody")
    else:
        path.chmod(path.stat().st_mode | 0o020)
    bench.install()
    assert "is not used: others may write there; chmod -R go-w" in capsys.readouterr().out
    assert len(bench.built) == 2 and bench.built[1].is_relative_to(bench.venv)  # its own
    bench.install()
    assert len(bench.built) == 2


def test_a_cache_that_cannot_be_made_is_not_used(bench, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    bench.install()
    assert "is not used: Not a directory" in capsys.readouterr().out and bench.built[0].is_relative_to(bench.venv)


def test_the_build_takes_four_processes_at_most_unless_told_and_make_s_own_flags_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(build_horovod.os, "cpu_count", lambda: 128)
    monkeypatch.delenv("BUILD_PROCESSES", raising=False)
    monkeypatch.setenv("MAKEFLAGS", "")  # as in a recipe; Horovod's set-up would take 8
    assert build_horovod.build_environment(tmp_path)["MAKEFLAGS"] == "-j4"
    monkeypatch.setattr(build_horovod.os, "cpu_count", lambda: 2)
    assert build_horovod.build_environment(tmp_path)["MAKEFLAGS"] == "-j2"
    monkeypatch.setenv("BUILD_PROCESSES", "16")
    assert build_horovod.build_environment(tmp_path)["MAKEFLAGS"] == "-j16"


def test_a_wrong_number_of_processes_is_refused_before_anything_is_made(tmp_path):
    done = set_up(tmp_path / "venv", env={"BUILD_PROCESSES": "many"})
    assert done.code == 1 and done.err.count("\n") == 1 and "BUILD_PROCESSES=many" in done.err
    assert not (tmp_path / "venv").exists()


def test_the_log_has_its_key_and_a_build_s_wheel_is_for_its_owner_to_write(tmp_path, monkeypatch):
    """A real call of pip's stand-in: it leaves a wheel, or fails."""
    monkeypatch.setattr(build_horovod, "compiler", lambda: "true")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "[ 50%] of it"\n[ -n "$FAIL" ] && exit 1\n'
                      'while [ "$1" != --wheel-dir ]; do shift; done\numask 0; echo wheel > "$2/horovod.whl"\n')
    python.chmod(0o755)
    folder = tmp_path / "horovod-0.28.1-key"
    build_horovod.build(tmp_path / "venv", PIN, folder)
    assert not (folder / "horovod.whl").stat().st_mode & 0o022 and not folder.stat().st_mode & 0o022
    monkeypatch.setenv("FAIL", "yes")
    log = tmp_path / "horovod-0.28.1-key.log"
    with pytest.raises(build_horovod.BuildError, match=re.escape(str(log))):
        build_horovod.build(tmp_path / "venv", PIN, folder)
    assert "[ 50%]" in log.read_text() and (folder / "horovod.whl").exists()


def test_horovod_is_there_where_it_can_be_built():
    """So that a build that fails is not taken for a missing compiler."""
    assert not build_horovod.compiler() or not missing("02_horovod/pytorch"), missing("02_horovod/pytorch")


def test_without_a_compiler_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build_horovod.BuildError, match=r"apt install g\+\+ make python3-dev"):
        build_horovod.install(tmp_path, PIN)


@chapters("02_horovod/pytorch")
@pytest.mark.skipif(not build_horovod.compiler(), reason="the compiler is a part of the key")
def test_horovod_s_wheel_is_cached_under_all_that_it_links_to(chapter, monkeypatch):
    venv, pin = Path(sys.prefix), environment.pins()[1]["built"][0]
    wheel = build_horovod.cached_wheel(venv, pin)
    monkeypatch.setattr(build_horovod, "VERSIONS", "print('the same')")
    others = {build_horovod.cached_wheel(venv, pin)}
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    others.add(build_horovod.cached_wheel(venv, pin))
    monkeypatch.setattr(build_horovod, "VERSIONS", "print('another torch')")
    others.add(build_horovod.cached_wheel(venv, pin))
    assert len(others | {wheel}) == 4


# Torchvision's mend

FAKE_TORCH = """
import sys, types
defined = []
library = types.SimpleNamespace(Library=lambda *_: types.SimpleNamespace(define=defined.append))
"""
FAKE_TORCHVISION = {"extension.py": "import torch\ndef _has_ops():\n    return False\n", "__init__.py": """
from torchvision import extension
import torch
if not torch.defined:
    raise RuntimeError("operator torchvision::nms does not exist")
"""}


def test_a_torchvision_that_is_installed_again_is_mended_again(ready, capsys):
    """Stand-ins for torch and torchvision, in an environment of its own."""
    packages, = (ready / "lib").glob("python*/site-packages")
    (packages / "torchvision").mkdir()
    (packages / "torch.py").write_text(FAKE_TORCH)

    def install():
        for name, text in FAKE_TORCHVISION.items():
            (packages / "torchvision" / name).write_text(text)
    install()
    environment.mend_torchvision(ready)
    assert environment.to_do(ready) is None
    install()
    assert environment.to_do(ready) == environment.TORCHVISION_GONE
    assert set_up(ready).out == "set-up: 3/5 torchvision\n"
    assert subprocess.run([ready / "bin" / "python", "-c", "import torchvision"]).returncode == 0
    assert environment.to_do(ready) is None
    (packages / "torchvision" / "__init__.py").write_text("")  # one that loads by itself
    (packages / "torchvision" / "extension.py").write_text("")
    assert environment.to_do(ready) == environment.TORCHVISION_GONE
    assert set_up(ready).code == 0
    assert (packages / "torchvision" / "extension.py").read_text() == "" and environment.to_do(ready) is None


def test_torchvision_s_mend_is_only_where_it_is_needed():
    import torchvision

    text = Path(torchvision.extension.__file__).read_text()
    assert (environment.MEND in text) == (not torchvision.extension._has_ops())
    assert text.count(environment.MEND) <= 1


def test_the_doctor_names_a_torchvision_that_lost_its_mend(tmp_path):
    import torchvision

    extension = Path(torchvision.extension.__file__)
    if environment.MEND not in extension.read_text():
        pytest.skip("torchvision loads beside this torch as it is")
    copy, venv = tmp_path / "torchvision", make_venv(tmp_path / "venv")
    copy.mkdir()
    for path in extension.parent.iterdir():
        if path.name not in ("extension.py", "__pycache__"):
            (copy / path.name).symlink_to(path)
    (copy / "extension.py").write_text(extension.read_text().replace(environment.MEND, ""))
    (venv / environment.MENDED).write_text(str(copy / "extension.py"))
    done = execute([venv / "bin" / "python", ROOT / "submit" / "doctor.py"], timeout=60,
                   env={"PYTHONPATH": f"{tmp_path}:{extension.parent.parent}"})
    symptom, _, cure = load_module(ROOT / "submit" / "doctor.py").FAULTS["torchvision"]
    assert done.code != 0 and "Traceback" not in done.err
    assert f"| {symptom}" in done.out and cure in done.out, done.out + done.err
