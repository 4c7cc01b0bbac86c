"""The footprint of a Llama of 8 billion parameters, compared with what torchtitan measured.

Source: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, eager.
"""

import json
import sys

import pytest
from conftest import PROGRAMS, run_command

RESERVED = {8: 82.4, 128: 67.0}  # {ranks: GiB that PyTorch's allocator reserved at most}
TOKENS, LAYERS, WIDTH, KV_WIDTH, FFN_WIDTH, VOCABULARY = 2 * 8192, 32, 4096, 1024, 14336, 128256
BLOCK = 2 * WIDTH * (WIDTH + KV_WIDTH + 1) + 3 * WIDTH * FFN_WIDTH  # parameters
ENDS = WIDTH * (2 * VOCABULARY + 1)  # parameters of the embedding, the last norm and the output


def allocated(ranks):
    """Return the bytes that are in use when the gradient of the logits has been computed."""
    states = 12 * (LAYERS * BLOCK + ENDS) / ranks  # fp32 parameters and Adam's two moments
    kept = TOKENS * (4 * WIDTH + KV_WIDTH + FFN_WIDTH)  # input, query, attention, down, value, gate
    logits = 3 * TOKENS * VOCABULARY  # log-softmax, its gradient and that of the logits, in fp32
    return states + 2 * LAYERS * kept + 4 * logits + 2 * (ENDS + BLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RESERVED)
def test_peak(tmp_path, ranks):
    command = [sys.executable, "-m", "cluster.footprint", "--ranks", ranks, "--gpus-per-node", 8,
               "--tensors", "fake", "--results", tmp_path / "results", PROGRAMS / "llama.py"]
    result = run_command(command)
    assert result.code == 0, result.err
    memory = json.loads((tmp_path / "results").read_text())["memory"]
    assert memory["peak"] == pytest.approx(allocated(ranks), rel=0.02)
    # FSDP gathers and reduces on CUDA streams of their own, and each stream keeps what it has
    # freed: the largest gathered parts (the ends, then a block), and the shards of the gradients.
    reserved = memory["peak"] + memory["gradients"] + 2 * (ENDS + BLOCK)
    assert reserved / 2**30 == pytest.approx(RESERVED[ranks], rel=0.1)
