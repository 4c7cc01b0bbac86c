"""Where a program runs does not matter: without a home, from a checkout that may not be written to, on a full disk."""

import json
import os
import re
import shutil
import sys

import pytest
from conftest import BIN, LESSONS, ROOT, case, execute, lines, run
from test_checkpoints import own_mounts, within

SOME = ("--epochs", 1, "--max-steps", 3)
every = pytest.mark.parametrize("chapter", [
    case(chapter, marks=[] if chapter == "03_ddp" else [pytest.mark.slow]) for chapter in LESSONS])
BARE = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "LC_ALL": "C"}  # where root may not write either


@pytest.mark.fault
def test_a_reader_that_has_gone_ends_the_job():
    """`mpiexec -n 2 python main.py | head -1` ends, soon."""
    words = [BIN / "mpiexec", "-n", 2, sys.executable, ROOT / "03_ddp" / "main.py", "--epochs", 50]
    done = execute(["sh", "-c", '"$@" | head -1', "sh", *words], timeout=100)
    assert done.out.startswith("digits: ") and len(done.out.splitlines()) == 1


@every
def test_a_folder_travels(chapter, tmp_path):
    """Each chapter's folder, copied to a place with blanks and umlauts in its name, runs there."""
    main, place = LESSONS[chapter], tmp_path / "Übung der Gäste"
    shutil.copytree(main.parent, place, ignore=shutil.ignore_patterns("__pycache__", "data"))
    mpiexec = [] if chapter.startswith("01") else [BIN / "mpiexec", "-n", 2]
    done = execute([*mpiexec, sys.executable, main.name, "--max-steps", 2, "--results", "r"], cwd=place)
    assert done.code == 0, done.err
    assert [each["chapter"] for each in lines(place / "r")] == [chapter]


@own_mounts
@pytest.mark.fault
@every
def test_a_read_only_checkout(chapter, tmp_path):
    """All that could write beside itself: bytecode, caches, what is compiled."""
    folder = tmp_path / "Gäste"
    folder.mkdir()
    mpiexec = [] if chapter.startswith("01") else [BIN / "mpiexec", "-n", 2]
    flags = *SOME, "--results", folder / "r", "--checkpoint", folder / "c"
    words = within(f"mount --bind '{ROOT}' '{ROOT}' && mount -o remount,ro,bind '{ROOT}'", [
        *mpiexec, sys.executable, "-O", LESSONS[chapter], *flags])
    done = execute(words, timeout=200, env=BARE, cwd="/")
    assert done.code == 0 and "test accuracy" in done.out, done.err
    assert [found["chapter"] for found in lines(folder / "r")] == [chapter]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full, which is a full disk")
@pytest.mark.fault
@pytest.mark.parametrize("chapter", [case("03_ddp"), case("02_horovod/tensorflow", marks=[pytest.mark.slow])])
def test_a_record_that_finds_no_room_is_printed(chapter, tmp_path):
    """Once, and all ranks end with that code. Only the last write notices that the disk is full."""
    full_disk = tmp_path / "results"
    full_disk.symlink_to("/dev/full")
    done = run(chapter, 2, *SOME, "--results", full_disk, launcher=True)
    assert done.code == 2 and "test accuracy" in done.out, done
    line = rf"main\.py: could not write the record to {full_disk} \(No space left on device\): (.*)\n"
    record = json.loads(re.fullmatch(line, done.err)[1])
    assert record["chapter"] == chapter
