"""Find the hang, and mend it.

    torchrun --nproc-per-node 2 exercise.py

trains digits on two ranks and keeps, in best.pt, the network of that epoch whose loss over all
validation images is the lowest, with this loss and its accuracy over all of them. Or so it should:
it stops, without a word, somewhere in the middle.
"""

import gc

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_default_dtype(torch.float64)  # 16 digits, so that two trainings can be compared
EPOCHS, BATCH, RATE, MOMENTUM = 7, 64, 0.2, 0.9


def load_data():
    """Images to train on, and to validate with."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images) / 16, torch.tensor(labels)
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def build_model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Best:
    """Keeps the best network so far in a file."""

    def __init__(self, model, images, labels):
        self.model, self.loss = model, float("inf")
        self.images, self.labels = images, labels  # this rank's validation images

    @torch.no_grad()
    def look(self, epoch):
        """Called by all ranks after each epoch."""
        logits = self.model(self.images)
        loss = cross_entropy(logits, self.labels)
        if loss < self.loss:
            self.loss = loss
            self.save(epoch, logits.argmax(1) == self.labels)

    def save(self, epoch, right):
        accuracy = share_of_all(right)
        if dist.get_rank() == 0:
            torch.save({"epoch": epoch, "loss": float(self.loss), "accuracy": accuracy,
                        "model": self.model.state_dict()}, "best.pt")


def share_of_all(right):
    """The share of True in the tensors of all ranks."""
    tensors = [torch.empty_like(right) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, right)
    return torch.cat(tensors).double().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, valid = load_data()
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, BATCH // ranks, sampler=sampler, drop_last=True)
    model = build_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    best = Best(model, *valid[rank::ranks])

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(ddp(images), labels).backward()
            optimizer.step()
        model.eval()
        best.look(epoch)


if __name__ == "__main__":
    main()
    gc.collect()  # DDP goes before the group that it uses
    dist.destroy_process_group()
