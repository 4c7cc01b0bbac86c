"""The chapters' lines for a GPU, on a machine without one: see programs/fake_cuda.py."""

import pytest
from conftest import run


@pytest.mark.parametrize("chapter", ["01_single_node", "03_ddp", "04_deepspeed"])
def test_no_step_waits_for_the_gpu_or_mixes_devices(chapter):
    result = run(chapter, 1, "--max-steps", 3, hook=["fake_cuda.py"], launcher=True)
    assert result.code == 0 and "cuda" in result.out, result.out + result.err
