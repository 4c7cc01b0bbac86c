"""What BatchNorm makes of data parallelism: with equal global batches, two trainings all the same.

    python batchnorm.py
    mpiexec -n 2 python batchnorm.py      # 1, 2, 4 ... ranks, which divide 64

Trains a ResNet-18 on digits, 6 steps of 64 images, in fp64, twice: with torchvision's BatchNorm,
which takes mean and variance of the images that its rank has, and with one that takes those of all
ranks' images. nn.SyncBatchNorm is such a one, and faster, but for GPUs only.
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
    """An all-reduce with a gradient: every rank's loss depends on what each rank put in."""

    @staticmethod
    def forward(_, own):
        total = own.clone()
        dist.all_reduce(total)
        return total

    backward = forward


class BatchNormOfAllRanks(nn.BatchNorm2d):
    """In training the statistics are those of all ranks' images: (images, channels, h, w)."""

    def forward(self, images):
        if not self.training:
            return super().forward(images)
        own = images.transpose(0, 1).flatten(1)  # a row a channel
        count = own.shape[1] * dist.get_world_size()
        mean = SumOverRanks.apply(own.sum(1)) / count
        deviations = own - mean[:, None]
        variance = SumOverRanks.apply((deviations ** 2).sum(1)) / count
        scale = self.weight / torch.sqrt(variance + self.eps)
        scaled = deviations * scale[:, None] + self.bias[:, None]
        return scaled.unflatten(1, (len(images), *images.shape[2:])).transpose(0, 1)


def train(norm_layer, rank, ranks):
    """The mean loss over all steps and ranks."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10, norm_layer=norm_layer)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = (images.reshape(-1, 1, 8, 8) / 16).expand(-1, 3, -1, -1)
    order = torch.randperm(len(labels))  # the same on all ranks
    loss_sum = 0.0
    for step in range(STEPS):
        own = order[step * BATCH:][rank:BATCH:ranks]
        loss = cross_entropy(ddp(images[own]), labels[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item()
    return sum(gather(loss_sum)) / STEPS / ranks


def main():
    rank, ranks, _ = find_ranks()
    if BATCH % ranks:
        sys.exit(f"{ranks} ranks do not divide {BATCH} images: take 1, 2 or 4")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # random numbers, too: in fp32 they depend on the CPU
    dist.init_process_group("gloo")
    if rank == 0:
        print(f"{ranks} rank{'s' * (ranks > 1)}, {BATCH} images a step, mean loss of {STEPS} steps",
              flush=True)
    each = train(nn.BatchNorm2d, rank, ranks)
    if rank == 0:
        print(f"statistics of each rank's images: {each:.6f}", flush=True)
    together = train(BatchNormOfAllRanks, rank, ranks)
    if rank == 0:
        print(f"statistics of all ranks' images:  {together:.6f}")
    dist.barrier()


if __name__ == "__main__":
    run(main)
