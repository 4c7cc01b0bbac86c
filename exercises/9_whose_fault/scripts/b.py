"""Train on all ranks with DistributedDataParallel, reproducibly."""

import gc

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS, SEED = 64, 2, 7


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    order = torch.Generator().manual_seed(SEED)
    share = BATCH // dist.get_world_size()
    loader = DataLoader(data, share, shuffle=True, drop_last=True, generator=order)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(ddp(images), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
    gc.collect()  # DDP goes before the group that it uses
    dist.destroy_process_group()
