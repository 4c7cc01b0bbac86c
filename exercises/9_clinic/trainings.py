"""Three trainings, a, b and c, with one mistake each.

    torchrun --nproc-per-node 2 trainings.py a
"""

import gc
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = 64, 2


def load_batches():
    """Yield this rank's images and labels of each step."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def train(model, optimizer, exchange=None):
    """Train, and return the last loss. exchange: averages gradients, where no wrapper does."""
    for images, labels in load_batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        if exchange:
            exchange([parameter.grad for parameter in model.parameters()])
        optimizer.step()
    return loss


def exchange_flat(gradients):
    """Exchange all gradients in one flat all-reduce, then copy them back."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, flat.split(sizes)):
        gradient.copy_(part.view_as(gradient))


def exchange_each(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def train_a():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return train(model, torch.optim.Adam(model.parameters(), lr=0.003), exchange_flat)


def train_b():
    torch.manual_seed(100 + dist.get_rank())  # so that no two ranks drop the same units
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), exchange_each)


def train_c():
    """Train a body, which many tasks share, and a head."""
    torch.manual_seed(5)
    body = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU()))
    model = nn.Sequential(body, nn.Linear(32, 10))
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    loss = {"a": train_a, "b": train_b, "c": train_c}[sys.argv[1]]()
    if dist.get_rank() == 0:
        print(f"loss of the last step: {loss:.3f}")
    gc.collect()  # free DDP before the process group that it uses
    dist.destroy_process_group()
