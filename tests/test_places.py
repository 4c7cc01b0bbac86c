"""Programs run anywhere: from a copied folder, a read-only checkout, with a full disk."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import BIN, LESSONS, ROOT, case, execute, lines, needs_root, run

SOME = ("--epochs", 1, "--max-steps", 3)
BARE = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "LC_ALL": "C"}  # not writable
every = pytest.mark.parametrize("chapter", [
    case(chapter, marks=[] if chapter == "03_ddp" else [pytest.mark.slow]) for chapter in LESSONS])


def mpiexec(chapter):
    return [] if chapter.startswith("01") else [BIN / "mpiexec", "-n", 2]


@pytest.mark.fault
def test_closed_pipe_ends_the_job():
    """`mpiexec -n 2 python main.py | head -1` ends soon."""
    words = [BIN / "mpiexec", "-n", 2, sys.executable, ROOT / "03_ddp" / "main.py", "--epochs", 50]
    done = execute(["sh", "-c", '"$@" | head -1', "sh", *words], timeout=100)
    assert done.out.startswith("digits: ") and len(done.out.splitlines()) == 1


@every
def test_copied_folder_runs(chapter, tmp_path):
    """Each chapter runs in a copy of its folder, with spaces and umlauts in the path."""
    main, folder = LESSONS[chapter], tmp_path / "Übung der Gäste"
    shutil.copytree(main.parent, folder, ignore=shutil.ignore_patterns("__pycache__", "data"))
    words = [*mpiexec(chapter), sys.executable, main.name, "--max-steps", 2, "--results", "r"]
    done = execute(words, cwd=folder)
    assert done.code == 0, done.err
    assert [result["chapter"] for result in lines(folder / "r")] == [chapter]


UNSHARE = ["unshare", "--mount", *["--user", "--map-root-user"] * bool(os.getuid())]
MOUNTS = shutil.which("unshare") and subprocess.run([*UNSHARE, "true"], capture_output=True)
CANNOT_MOUNT = None
if not MOUNTS or MOUNTS.returncode:
    CANNOT_MOUNT = "mounting is not permitted here"


@needs_root(CANNOT_MOUNT)
@pytest.mark.fault
@every
def test_a_read_only_checkout(chapter, tmp_path):
    """Programs write nothing into it: no bytecode, no cache, nothing compiled."""
    folder = tmp_path / "Gäste"
    folder.mkdir()
    words = [*mpiexec(chapter), sys.executable, "-O", LESSONS[chapter], *SOME,
             "--results", folder / "r", "--checkpoint", folder / "c"]
    mount = f"mount --bind '{ROOT}' '{ROOT}' && mount -o remount,ro,bind '{ROOT}'"
    done = execute([*UNSHARE, "sh", "-c", f'{mount} && exec "$@"', "sh", *words], timeout=200,
                   env=BARE, cwd="/")
    assert done.code == 0 and "test accuracy" in done.out, done.err
    assert [result["chapter"] for result in lines(folder / "r")] == [chapter]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full, which is a full disk")
@pytest.mark.fault
def test_record_is_printed_if_the_disk_is_full(tmp_path):
    full_disk = tmp_path / "results"
    full_disk.symlink_to("/dev/full")  # only the last write notices
    done = run("03_ddp", 2, *SOME, "--results", full_disk, launcher=True)
    assert done.code == 2 and "test accuracy" in done.out, done
    line = re.search(r"main\.py: could not write the record to .* \(No space .*?\): (.*)", done.err)
    assert json.loads(line[1])["chapter"] == "03_ddp"
