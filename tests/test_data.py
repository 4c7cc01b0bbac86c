"""Which images a rank sees, and that they stay small. Small files of MNIST and SVHN, for other tests, too."""

import struct

import numpy
import pytest
import scipy.io
from conftest import case, lines, observe, record

IMAGES = 1437  # training images of digits


def passes(path, steps):
    """Each pass over data as a list of its batches, each a list of indices; steps: batches of a pass in training."""
    found = lines(path)
    if isinstance(found[0][0], list):
        return found
    return [found[first:first + steps] for first in range(0, len(found), steps)]  # TensorFlow's: a line a batch


@pytest.mark.parametrize(("chapter", "ranks", "batch"), [
    case("03_ddp", 3, 50), case("02_horovod/tensorflow", 3, 50, marks=[pytest.mark.slow])])
def test_each_epoch_deals_out_all_images_but_a_tail(chapter, ranks, batch, tmp_path):
    epochs, global_batch = 3, ranks * batch
    done = observe(chapter, ranks, tmp_path, "--batch-size", batch, "--epochs", epochs)
    assert done.code == 0, done.err
    tails, orders = [], []
    for epoch in range(epochs):
        dealt = [passes(tmp_path / f"batches.{rank}", IMAGES // global_batch)[epoch] for rank in range(ranks)]
        assert all(len(one) == batch for batches in dealt for one in batches)  # every step is a whole global batch
        order = [index for batches in dealt for one in batches for index in one]
        assert len(order) == len(set(order)), "ranks share images"
        assert len(order) == IMAGES - IMAGES % global_batch
        tails.append(frozenset(range(IMAGES)) - set(order))
        orders.append(tuple(order))
    assert len(set(tails)) == len(set(orders)) == epochs  # another tail and another order each time


def write_mnist(folder, train, test=50):
    """Files of MNIST's own format (IDX, big-endian header), with random images."""
    raw, random = folder / "MNIST" / "raw", numpy.random.default_rng(0)
    raw.mkdir(parents=True)
    for part, n in ("train", train), ("t10k", test):
        images = random.integers(0, 256, (n, 28, 28), dtype=numpy.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, n, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, n) + random.integers(0, 10, n, dtype=numpy.uint8).tobytes())
    return raw


def write_svhn(folder, train, test):
    """Files of SVHN's own format: MATLAB arrays X (32, 32, 3, n) and y (n, 1), with 10 for the digit 0."""
    random = numpy.random.default_rng(0)
    for part, n in ("train", train), ("test", test):
        scipy.io.savemat(folder / f"{part}_32x32.mat", {
            "X": random.integers(0, 256, (32, 32, 3, n), dtype=numpy.uint8),
            "y": random.integers(1, 11, (n, 1), dtype=numpy.uint8)})


@pytest.mark.parametrize("chapter", [
    case("01_single_node"), case("01_single_node/main_tf.py", marks=[pytest.mark.slow])])
def test_images_stay_bytes(chapter, tmp_path):
    """60,000 images more cost their bytes and a little, not four times that as floats."""
    peaks = []
    for train in 640, 60_640:
        write_mnist(tmp_path / str(train), train)
        found = record(chapter, 1, "--dataset", "mnist", "--data-dir", tmp_path / str(train), "--max-steps", 3,
                       folder=tmp_path)
        peaks.append(found["peak_memory_bytes"])
    assert peaks[1] - peaks[0] < 3 * 60_000 * 28 * 28  # twice while torchvision checks it; floats are 4 times more
