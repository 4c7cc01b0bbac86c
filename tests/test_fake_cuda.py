"""The chapters' lines for a GPU, on a machine without one: see programs/fake_cuda.py."""

import pytest
from conftest import run


@pytest.mark.parametrize(("chapter", "flags"), [
    ("01_single_node", "--max-steps 3"), ("03_ddp", "--max-steps 3"),
    ("04_deepspeed", "--max-steps 3"),
    ("05_zero/fsdp.py", "--stage 1 --max-steps 1")])  # one step: the second is counted
def test_the_cpu_draws_the_weights_and_no_step_waits_or_mixes_devices(chapter, flags):
    result = run(chapter, 1, *flags.split(), hook=["fake_cuda.py"], launcher=True)
    assert result.code == 0 and "cuda" in result.out, result.out + result.err
