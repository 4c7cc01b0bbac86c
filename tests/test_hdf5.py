"""reading_data/hdf5.py reads each image once per epoch."""

import re

from conftest import run


def test_a_dataloader_with_workers_reads_hdf5_on_two_ranks(tmp_path):
    """The program itself checks that each image is read once."""
    result = run("reading_data/hdf5.py", 2, "--workers", 1, launcher=True, cwd=tmp_path)
    assert result.code == 0, result.err
    assert re.match(r"2 ranks, 1 workers each: [\d,]+ images/s", result.out)
