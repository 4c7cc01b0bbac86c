"""Accumulate gradients over micro-batches.

A global batch that does not fit into memory is taken in parts, and makes the same step.
"""

from contextlib import nullcontext

import torch
from torch.nn.functional import cross_entropy


def train_step(ddp, optimizer, micro_batches):
    """Make one step of the optimizer, with the gradient of the mean loss over all images.

    ddp            the model, wrapped in DistributedDataParallel on two ranks
    optimizer      of its parameters
    micro_batches  this rank's list of (images, labels); the ranks' lists are equally long, and
                   their n-th micro-batches equally large. First solve it for micro-batches that
                   are all equally large, then for a last one that is smaller.

    cross_entropy(ddp(images), labels) is the mean loss over the images of one micro-batch. Each
    micro-batch goes through ddp once. Gradients pass between the ranks once, with the last
    micro-batch: communication costs time.
    """
    raise NotImplementedError  # your lines, about eight
