"""reading_data/hdf5.py reads each image once per epoch, and a mistake on one rank ends all."""

import re
import sys

from conftest import BIN, ROOT, run_command


def test_a_dataloader_with_workers_reads_hdf5_on_two_ranks(tmp_path):
    """The program itself checks that each image is read once."""
    command = [BIN / "mpiexec", "-n", 2, sys.executable, ROOT / "reading_data" / "hdf5.py"]
    result = run_command([*command, "--workers", 1], timeout=120, cwd=tmp_path)
    assert result.code == 0, result.err
    assert re.match(r"2 ranks, 1 workers each: [\d,]+ images/s", result.out)
    result = run_command(command, timeout=60, cwd="/proc")
    assert result.code and "No such file or directory: 'data'" in result.err, result.err
