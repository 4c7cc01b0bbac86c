"""BatchNorm under data parallelism: the same global batch still gives a different training.

    python batchnorm.py
    mpiexec -n 2 python batchnorm.py      # or any other divisor of 64

Trains a ResNet-18 twice on digits, in fp64, 6 steps of 64 images: first with PyTorch's BatchNorm,
which uses mean and variance of one rank's images, then with a BatchNorm that uses those of all
ranks' images. nn.SyncBatchNorm does the latter, too, and faster, but only on GPUs.
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from workshop.devices import gather
from workshop.ranks import find_ranks, run

STEPS, BATCH = 6, 64


class SumOverRanks(torch.autograd.Function):
    """An all-reduce with a gradient: every rank's loss depends on every rank's input."""

    @staticmethod
    def forward(_, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    backward = forward  # each input's gradient is the sum of all ranks' gradients


class BatchNormOfAllRanks(nn.BatchNorm2d):
    """BatchNorm over all ranks' images in training. Input: (images, channels, height, width)."""

    def forward(self, images):
        if not self.training:
            return super().forward(images)
        pixels = images.transpose(0, 1).flatten(1)  # one row per channel
        count = pixels.shape[1] * dist.get_world_size()
        mean = SumOverRanks.apply(pixels.sum(1)) / count
        deviations = pixels - mean[:, None]
        variance = SumOverRanks.apply((deviations ** 2).sum(1)) / count
        scale = self.weight / torch.sqrt(variance + self.eps)
        scaled = deviations * scale[:, None] + self.bias[:, None]
        return scaled.unflatten(1, (len(images), *images.shape[2:])).transpose(0, 1)


def train(norm_layer, rank, world_size):
    """Train a ResNet-18; return the mean loss over all steps and ranks."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10, norm_layer=norm_layer)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = (images.reshape(-1, 1, 8, 8) / 16).expand(-1, 3, -1, -1)
    order = torch.randperm(len(labels))  # the same on all ranks
    loss_sum = 0.0
    for step in range(STEPS):
        global_batch = order[step * BATCH:(step + 1) * BATCH]
        indices = global_batch[rank::world_size]
        loss = cross_entropy(ddp(images[indices]), labels[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item()
    return sum(gather(loss_sum)) / STEPS / world_size


def main():
    rank, world_size, _ = find_ranks()
    if BATCH % world_size:
        sys.exit(f"cannot split {BATCH} images evenly among {world_size} ranks: use 1, 2 or 4")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # in fp32, the printed losses would depend on the CPU
    dist.init_process_group("gloo")
    if rank == 0:
        print(f"ranks: {world_size}, mean loss of {STEPS} steps of {BATCH} images", flush=True)
    loss = train(nn.BatchNorm2d, rank, world_size)
    if rank == 0:
        print(f"statistics of each rank's images: {loss:.6f}", flush=True)
    loss = train(BatchNormOfAllRanks, rank, world_size)
    if rank == 0:
        print(f"statistics of all ranks' images:  {loss:.6f}")
    dist.barrier()


if __name__ == "__main__":
    run(main)
