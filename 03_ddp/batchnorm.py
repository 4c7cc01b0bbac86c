"""BatchNorm under data parallelism: the same global batch still gives a different training.

    python batchnorm.py
    mpiexec -n 2 python batchnorm.py      # or any other divisor of 64

Trains a ResNet-18 on digits, 6 steps of 64 images, in fp64, twice: with torchvision's BatchNorm,
which uses mean and variance of its own rank's images, and with one that uses those of all ranks'
images. nn.SyncBatchNorm does this too, and faster, but only on GPUs.
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from ranks import find_ranks, gather, run

STEPS, BATCH = 6, 64


class SumOverRanks(torch.autograd.Function):
    """An all-reduce with a gradient: every rank's loss depends on every rank's input."""

    @staticmethod
    def forward(_, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    backward = forward


class BatchNormOfAllRanks(nn.BatchNorm2d):
    """BatchNorm that trains with statistics of all ranks' images: (images, channels, h, w)."""

    def forward(self, images):
        if not self.training:
            return super().forward(images)
        rows = images.transpose(0, 1).flatten(1)  # one row per channel
        count = rows.shape[1] * dist.get_world_size()
        mean = SumOverRanks.apply(rows.sum(1)) / count
        deviations = rows - mean[:, None]
        variance = SumOverRanks.apply((deviations ** 2).sum(1)) / count
        scale = self.weight / torch.sqrt(variance + self.eps)
        scaled = deviations * scale[:, None] + self.bias[:, None]
        return scaled.unflatten(1, (len(images), *images.shape[2:])).transpose(0, 1)


def train(norm_layer, rank, ranks):
    """Train; return the mean loss over all steps and ranks."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10, norm_layer=norm_layer)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = (images.reshape(-1, 1, 8, 8) / 16).expand(-1, 3, -1, -1)
    order = torch.randperm(len(labels))  # the same on all ranks
    loss_sum = 0.0
    for step in range(STEPS):
        indices = order[step * BATCH:][rank:BATCH:ranks]
        loss = cross_entropy(ddp(images[indices]), labels[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item()
    return sum(gather(loss_sum)) / STEPS / ranks


def main():
    rank, ranks, _ = find_ranks()
    if BATCH % ranks:
        sys.exit(f"{ranks} ranks do not divide {BATCH} images: use 1, 2 or 4")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # in fp32, random numbers depend on the CPU
    dist.init_process_group("gloo")
    if rank == 0:
        print(f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {BATCH} images per step, mean loss of "
              f"{STEPS} steps", flush=True)
    per_rank = train(nn.BatchNorm2d, rank, ranks)
    if rank == 0:
        print(f"statistics of each rank's images: {per_rank:.6f}", flush=True)
    over_ranks = train(BatchNormOfAllRanks, rank, ranks)
    if rank == 0:
        print(f"statistics of all ranks' images:  {over_ranks:.6f}")
    dist.barrier()


if __name__ == "__main__":
    run(main)
