"""From a one-GPU script to DistributedDataParallel: a solution."""

import gc

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_default_dtype(torch.float64)  # 16 digits, so that two trainings can be compared
EPOCHS, BATCH, RATE, MOMENTUM = 2, 64, 0.1, 0.9  # BATCH: images a step


def load_data():
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images) / 16, torch.tensor(labels)
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def build_model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, test = load_data()
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, BATCH // ranks, sampler=sampler, drop_last=True)
    model = build_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(ddp(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        mean = torch.tensor(sum(losses) / len(losses))
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean / ranks:.4f}")

    model.eval()
    with torch.no_grad():
        images, labels = test.tensors
        right = (model(images).argmax(1) == labels).sum().item()
    if rank == 0:
        print(f"test accuracy {right / len(test):.4f}")
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
    gc.collect()  # DDP goes before the group that it uses
    dist.destroy_process_group()
