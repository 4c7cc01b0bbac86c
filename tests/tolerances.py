"""All tolerances of the tests, each with the reason why it holds on any CPU.

CPUs sum in different orders (AVX2, AVX-512, AMX, the number of threads), so no bound is what one
CPU showed: it follows from the arithmetic, or the same run measures it.
"""

import json
import os

import numpy as np

# Parameters and losses that are equal in exact arithmetic, in fp64. It rounds at 1.1e-16; the sums
# of a step are over some thousand terms near 1, and the chapters' trainings enlarge an error by
# less than a thousand. That is 1e-10 of what a broken training shows, and 10,000 rounding errors.
FP64 = 1e-12

# The same in fp32 (rounded at 6e-8), for DeepSpeed, which has no fp64: the distance of the
# parameters is at most this many times that of two one-rank trainings in the same test that differ
# only by rounding, because the images in each batch are in reverse order. Both distances are over
# all parameters of the smooth variant (smooth.py), where rounding errors do not jump, so that one
# is as good a sample of rounding as the other. `make test-cpus` prints how much of it is used.
ROOM = 30

# The mean loss in fp32 of the smooth variant's epoch, or of a first step, before any parameter has
# changed: seven digits, of which sums over a batch and ten layers may lose three.
LOSS = 1e-4

# Relative change of a loss by bfloat16, which has 8 bits and so rounds by up to 1/512: some steps
# of some operations.
BFLOAT16 = 0.1

# Images of a test set whose two largest logits differ only by rounding, in fp32.
TIES = 1

# Counted bytes and elements, compared with a formula that leaves out biases and the rounding up of
# shares.
COUNT = 0.01

# Figures that a page or a paper prints with one digit after the point.
ONE_DECIMAL = 0.05

# What cost_model.ipynb claims of the cost model, plain arithmetic on published figures: the median
# and the largest error of the rows over a network, the largest within a node.
NETWORK_MEDIAN = 0.05
NETWORK_LARGEST = 0.10
NODE_LARGEST = 0.02
NODE_MIXED_LARGEST = 0.16  # mixed precision has a cost that the model leaves out

# Simpson's rule and other plain Python arithmetic, against the exact value.
ARITHMETIC = 1e-5

# The rate of a lab's link: an all-reduce of 25 MB against the bytes at the nominal rate. Frames of
# 9000 bytes have 1 % of headers; the rest is for a machine on which others compute, too.
RATE = 0.15


def distance(one, other):
    """Return the root of the summed squares of the differences of two vectors, or two numbers."""
    return float(np.linalg.norm(np.subtract(one, other)))


def note(kind, difference, bound):
    """Write a difference for the table of `make test-cpus`; bound None: a broken training."""
    if os.environ.get("NUMBERS"):
        with open(os.environ["NUMBERS"], "a") as file:
            file.write(json.dumps([kind, float(difference), bound and float(bound)]) + "\n")


def close(kind, difference, bound):
    """Assert that a difference of this kind is within its bound."""
    note(kind, difference, bound)
    assert difference <= bound, f"{kind}: {difference:.2e}, allowed {bound:.2e}"


def apart(kind, difference, bound):
    """Assert that a broken training differs by more than twice the bound."""
    note(f"broken: {kind}", difference, None)
    assert difference > 2 * bound, f"{kind}: {difference:.2e} would pass within {bound:.2e}"
