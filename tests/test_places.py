"""Programs run in a read-only checkout, and with a full disk."""

import json
import os
import re

import pytest
from conftest import LESSONS, ROOT, case, needs_root, read_records, run, run_command
from lab import unshare_command

from cluster.launch import rank_command

FLAGS = ("--epochs", 1, "--max-steps", 3)
READ_ONLY_HOME = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "LC_ALL": "C",
                  "PYTHONOPTIMIZE": "1"}
all_lessons = pytest.mark.parametrize("chapter", [
    case(chapter, marks=[] if chapter == "03_ddp" else [pytest.mark.slow]) for chapter in LESSONS])


@pytest.mark.fault
def test_a_closed_pipe_ends_the_job():
    """`mpiexec -n 2 python main.py | head -1` ends soon."""
    command = rank_command("03_ddp", 2, "--epochs", 50)
    result = run_command(["sh", "-c", '"$@" | head -1', "sh", *command], timeout=100)
    assert result.out.startswith("digits: ") and len(result.out.splitlines()) == 1


UNSHARE = unshare_command("--mount")


@needs_root(None if UNSHARE else "mounting is not permitted here")
@pytest.mark.fault
@all_lessons
def test_a_read_only_checkout_runs(chapter, tmp_path):
    """Programs write nothing into it: no bytecode, no cache, no compiled operators."""
    folder = tmp_path / "Gäste"
    folder.mkdir()
    command = rank_command(LESSONS[chapter], 1 if chapter.startswith("01") else 2, *FLAGS,
                           "--results", folder / "r", "--checkpoint", folder / "c")
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"'
    result = run_command([*UNSHARE, "sh", "-c", f'{mount} && exec "$@"', ROOT, *command],
                         timeout=200, env=READ_ONLY_HOME, cwd="/")
    assert result.code == 0 and "\ntest " in result.out, result.err
    assert [record["chapter"] for record in read_records(folder / "r")] == [chapter]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full, which is a full disk")
@pytest.mark.fault
def test_the_record_is_printed_if_the_disk_is_full(tmp_path):
    full_disk = tmp_path / "results"
    full_disk.symlink_to("/dev/full")  # opening it succeeds, writing fails
    result = run("03_ddp", 2, *FLAGS, "--results", full_disk, launcher=True)
    assert result.code == 2 and "test accuracy" in result.out, result
    message = r"main\.py: could not write the record to .* \(No space .*?\): (.*)"
    assert json.loads(re.search(message, result.err)[1])["chapter"] == "03_ddp"
