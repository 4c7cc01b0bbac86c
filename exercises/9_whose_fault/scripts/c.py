"""Train on all ranks with DistributedDataParallel; the steps are counted, not the epochs."""

import gc

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, STEPS = 64, 50


def endless(loader):
    """Batch after batch, epoch after epoch."""
    while True:
        yield from loader


def main():
    dist.init_process_group("gloo")
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    sampler = DistributedSampler(data, shuffle=True, seed=3, drop_last=True)
    loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=sampler, drop_last=True)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

    for step, (images, labels) in zip(range(STEPS), endless(loader)):
        optimizer.zero_grad()
        loss = cross_entropy(ddp(images), labels)
        loss.backward()
        optimizer.step()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
    gc.collect()  # DDP goes before the group that it uses
    dist.destroy_process_group()
