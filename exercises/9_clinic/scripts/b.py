"""Train on all ranks, each with its own noise on the images; gradients are averaged by hand."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = 64, 2


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)  # so that no two ranks add the same noise
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, BATCH // world_size, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            noisy_images = images + 0.05 * torch.randn_like(images)
            loss = cross_entropy(model(noisy_images), labels)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
