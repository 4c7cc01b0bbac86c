"""All ways to read deliver each image once per epoch, and detect errors."""

import re
import sys

import pytest
from conftest import BIN, ROOT, run_command

SOURCE = ROOT / "reading_data" / "read_data.py"


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_way_reads_each_image_once(nodes, tmp_path):
    """The program compares the images with those that it has written.

    With two nodes, MPICH is told to take even and odd ranks for different nodes.
    """
    command = [BIN / "mpiexec", "-n", 4, sys.executable, SOURCE, "--images", 512]
    result = run_command([*command, "--folder", tmp_path], timeout=60,
                         env={"MPIR_CVAR_NUM_CLIQUES": str(nodes)})
    assert result.code == 0 and "each way delivered each image once" in result.out, result.err
    bytes_read = {way: int(count.replace(",", "")) for way, count in re.findall(
        r"^([\w-]+) .* ([\d,]+)$", result.out, re.M)}
    assert bytes_read.keys() == {"files", "mpi-io", "mpi-io-default", "readers", "preloaded"}
    images = 512 * 3072
    assert bytes_read.pop("mpi-io-default") > 1.5 * images
    for count in bytes_read.values():  # the excess is the reading of /proc/self/io itself
        assert images <= count < images + 4000


def test_a_dataloader_with_workers_reads_hdf5_on_two_ranks(tmp_path):
    """The program itself checks that each image is read once."""
    command = [BIN / "mpiexec", "-n", 2, sys.executable, ROOT / "reading_data" / "hdf5.py",
               "--images", 256]
    result = run_command([*command, "--workers", 1, "--folder", tmp_path], timeout=120)
    assert result.code == 0, result.err
    assert re.match(r"2 ranks, 1 workers each: [\d,]+ images/s", result.out)
    result = run_command([*command, "--folder", "/proc/nowhere"], timeout=60)
    assert result.code and "No such file or directory: '/proc/nowhere'" in result.err, result.err
