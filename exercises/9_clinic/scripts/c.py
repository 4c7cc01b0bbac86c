"""Train on all ranks with DistributedDataParallel: a body shared by many tasks, and a head."""

import gc

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = 64, 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=sampler, drop_last=True)
    body = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU()))
    head = nn.Linear(32, 10)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(head(body(images)), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
    gc.collect()  # free DDP before the process group that it uses
    dist.destroy_process_group()
