"""MNIST is read from its own format; each test image counts once."""

import struct

import numpy
import pytest
from conftest import case, run


def write_mnist(folder, train, test):
    """Write files of MNIST's own format (IDX, big-endian header): random images, all labelled 3."""
    raw, random = folder / "MNIST" / "raw", numpy.random.default_rng(0)
    raw.mkdir(parents=True)
    for part, n in ("train", train), ("t10k", test):
        images = random.integers(0, 256, (n, 28, 28), dtype=numpy.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, n, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, n) + bytes([3]) * n)


@pytest.mark.parametrize("chapter", [
    case("03_ddp"), case("02_horovod"), case("04_deepspeed", marks=[pytest.mark.slow])])
def test_each_test_image_is_counted_once(chapter, tmp_path):
    """Rank 0 has one batch more. All images are labelled 3, so the accuracy must be 49 of 49."""
    write_mnist(tmp_path, 420, 49)
    result = run(chapter, 3, "--dataset", "mnist", "--data-dir", tmp_path, "--batch-size", 4,
                 "--epochs", 1)
    assert "test accuracy 1.0000 (49 of 49 images)" in result.out, result
