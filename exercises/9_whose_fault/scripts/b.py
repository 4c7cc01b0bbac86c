"""Train on all ranks; a class keeps model, wrapper and optimizer together."""

import gc

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = 64, 2


class Trainer:
    def __init__(self, model, data):
        self.model = model
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        self.sampler = DistributedSampler(data, drop_last=True)
        share = BATCH // dist.get_world_size()
        self.loader = DataLoader(data, share, sampler=self.sampler, drop_last=True)

    def step(self, images, labels):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train(self):
        for epoch in range(EPOCHS):
            self.sampler.set_epoch(epoch)
            self.ddp.train()
            losses = [self.step(images, labels) for images, labels in self.loader]
            if dist.get_rank() == 0:
                print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}")


def main():
    dist.init_process_group("gloo")
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    Trainer(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), data).train()


if __name__ == "__main__":
    main()
    gc.collect()  # DDP goes before the group that it uses
    dist.destroy_process_group()
