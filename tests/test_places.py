"""Where a program runs does not matter: without a home, from a checkout that may not be written to, on one core."""

import json
import os
import re
import shutil
import sys

import pytest
from conftest import BIN, ROOT, chapters, execute, lines, run
from test_checkpoints import own_mounts, within
from test_launchers import ALL

SOME = ("--epochs", 1, "--max-steps", 3)
HOMELESS = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere"}  # where root may not write either
PLAIN = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def train(chapter, folder, *before, python=(), env=None, cwd=None):
    """Train on 2 ranks as people do, by mpiexec (chapter 1 alone). Returns the record; all has to succeed."""
    main = ROOT / chapter / "main.py" if not chapter.endswith(".py") else ROOT / chapter
    mpiexec = [] if chapter.startswith("01") else [BIN / "mpiexec", "-n", 2]
    results = folder / "results of Jürgen.jsonl"
    done = execute([*before, *mpiexec, sys.executable, *python, main, *SOME, "--results", results,
                    "--checkpoint", folder / "checkpoint"], timeout=200, env=env, cwd=cwd)
    assert done.code == 0 and "test accuracy" in done.out, done.err
    found, = lines(results)
    return found


@pytest.mark.fault
def test_no_home(tmp_path):
    train("03_ddp", tmp_path, "env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME")
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    train("03_ddp", tmp_path, env=HOMELESS)


@pytest.mark.fault
def test_another_working_directory(tmp_path):
    train("03_ddp", tmp_path, cwd="/")


@pytest.mark.fault
def test_without_assertions(tmp_path):
    train("03_ddp", tmp_path, python=["-O"])


@pytest.mark.fault
def test_a_locale_of_c(tmp_path):
    folder = tmp_path / "Übung der Gäste"
    folder.mkdir()
    train("03_ddp", folder, env=PLAIN)


@pytest.mark.fault
@pytest.mark.skipif(not shutil.which("taskset"), reason="no taskset here")
def test_one_core(tmp_path):
    core = min(os.sched_getaffinity(0))
    train("03_ddp", tmp_path, "taskset", "-c", core)


@pytest.mark.fault
def test_a_reader_that_has_gone_ends_the_job(tmp_path):
    """`mpiexec -n 2 python main.py | head -1` ends, soon."""
    words = f"{BIN}/mpiexec -n 2 {sys.executable} {ROOT}/03_ddp/main.py --epochs 50 | head -1"
    done = execute(["sh", "-c", words], timeout=100)
    assert done.out.startswith("digits: ") and len(done.out.splitlines()) == 1


@own_mounts
@pytest.mark.fault
@chapters(*ALL)
def test_a_read_only_checkout(chapter, tmp_path):
    """All that could write beside itself: bytecode, caches, what is compiled."""
    folder = tmp_path / "Gäste"
    folder.mkdir()
    mount = within(f"mount --bind {ROOT} {ROOT} && mount -o remount,ro,bind {ROOT}", [])
    found = train(chapter, folder, *mount, python=["-O"], env=HOMELESS | {"LC_ALL": "C"}, cwd="/")
    assert found["chapter"] == chapter


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full, which is a full disk")
@pytest.mark.fault
@chapters("01_single_node", "02_horovod/tensorflow", "03_ddp", "05_zero/fsdp.py")
def test_a_record_that_finds_no_room_is_printed(chapter):
    done = run(chapter, 1 if chapter.startswith("01") else 2, *SOME, "--results", "/dev/full")
    assert done.code and "test accuracy" in done.out, done.err
    said, = re.findall(r"^\w+\.py: /dev/full has not got its record \(No space left on device\): (.*)$", done.err,
                       re.M)
    assert json.loads(said)["chapter"] == chapter


@own_mounts
@pytest.mark.fault
def test_a_full_dev_shm(tmp_path):
    """MPICH's ranks want it and die, soon and with a word on why; gloo does without."""
    mount = within("mount -t tmpfs -o size=64k none /dev/shm && head -c 64k /dev/zero > /dev/shm/all", [])
    main = ROOT / "03_ddp" / "main.py"
    done = execute([*mount, BIN / "mpiexec", "-n", 2, sys.executable, main, *SOME], timeout=60)
    assert done.code and "Bus error" in done.err + done.out, done
    done = execute([*mount, BIN / "torchrun", "--nproc-per-node", 2, main, *SOME], timeout=60)
    assert done.code == 0, done.err
