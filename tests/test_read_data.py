"""All ways to read deliver each image once per epoch, and detect errors."""

import re
import sys

import pytest
from conftest import BIN, ROOT, read_records, run_command

from tools.measuring.reading import WAYS

SOURCE = ROOT / "reading_data" / "read_data.py"
SIZE, IMAGES = 3072, 512


def read(way, folder, ranks=2, program=SOURCE, env=None):
    command = [BIN / "mpiexec", "-n", ranks, sys.executable, program, "--way", way,
               "--images", IMAGES, "--folder", folder, "--results", folder / "results"]
    return run_command(command, timeout=60, env=env)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_reads_each_image_once(way, tmp_path):
    """The program itself compares the images with those that it has written."""
    result = read(way, tmp_path)
    assert result.code == 0 and "each image once" in result.out, result.err
    record, = read_records(tmp_path / "results")
    excess = record["warm_read_bytes"] - SIZE * IMAGES
    if way == "mpi-io-default":
        assert excess > SIZE * IMAGES / 2
    else:  # the excess is the reading of /proc/self/io itself
        assert 0 <= excess < 4000


def test_each_node_has_its_own_readers(tmp_path):
    """MPICH is told to treat even and odd ranks as two nodes."""
    result = read("readers", tmp_path, ranks=4, env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    assert result.code == 0 and "each image once" in result.out, result.err


def test_a_dataloader_with_workers_reads_hdf5_on_two_ranks(tmp_path):
    """The program itself checks that each image is read once."""
    command = [BIN / "mpiexec", "-n", 2, sys.executable, ROOT / "reading_data" / "hdf5.py",
               "--images", 256]
    result = run_command([*command, "--workers", 1, "--folder", tmp_path], timeout=120)
    assert result.code == 0, result.err
    assert re.match(r"2 ranks, 1 workers each: [\d,]+ images/s", result.out)
    result = run_command([*command, "--folder", "/proc/nowhere"], timeout=60)
    assert result.code and "No such file or directory: '/proc/nowhere'" in result.err, result.err
