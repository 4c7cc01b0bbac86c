"""All tolerances of the tests, each with the reason why it is valid on any CPU.

CPUs sum in different orders (AVX2, AVX-512, AMX, the number of threads). So each bound follows from
the arithmetic, or is measured in the same run; none is a difference that one CPU happened to show.
"""

import numpy as np

# In fp64: parameters and losses that are equal in exact arithmetic. fp64 rounds at 1.1e-16; a step
# sums some thousand terms near 1, and the chapters' trainings enlarge an error by less than a
# thousand. The bound is 10,000 rounding errors, yet only 1e-10 times the difference that a
# broken training shows.
FP64 = 1e-12

# In fp32, for DeepSpeed, which has no fp64: the distance of two trainings' parameters is at most
# this factor times the distance that rounding alone causes. The same test measures the latter: it
# trains twice on one rank, the second time with reversed batches. Both distances are over all
# parameters of the smooth variant (smooth.py), in which rounding switches no ReLU.
ROUNDING_FACTOR = 30

# The smooth variant's mean loss of an epoch in fp32, relative: seven digits, of which sums over a
# batch and ten layers may lose three.
LOSS_FP32 = 1e-4

# Relative change of a loss by bfloat16, which has 8 bits, so that each operation rounds by up to
# 1/512: a few steps of a few operations.
BFLOAT16 = 0.1

# Number of test images whose two largest logits differ only by rounding, in fp32.
TIES = 1

# Counted bytes and elements, relative to a formula without biases and without rounding shares up.
COUNT = 0.01

# Numbers that a paper prints with one decimal.
ONE_DECIMAL = 0.05

# Plain Python arithmetic, compared with the exact value.
ARITHMETIC = 1e-5

# The rate of a lab's link, measured by an all-reduce of 16 MB, relative to the nominal rate. Frames
# of 9000 bytes have 1 % of headers; the rest is for a machine that other programs use, too.
LINK_RATE = 0.15


def distance(first, second):
    """Return the Euclidean distance of two vectors."""
    return float(np.linalg.norm(np.subtract(first, second)))


def assert_close(kind, difference, bound):
    """Assert that a difference of this kind is within its bound."""
    assert difference <= bound, f"{kind}: {difference:.2e}, allowed {bound:.2e}"


def assert_equal_in_fp64(values, expected):
    """Assert that two trainings' numbers are equal: arrays, tensors, or dictionaries of them."""
    if not isinstance(expected, dict):
        values, expected = {"parameters": values}, {"parameters": expected}
    for name, array in expected.items():
        assert_close(f"{name}, fp64", float(abs(values[name] - array).max()), FP64)
