"""Survive the queue.

    torchrun --nproc-per-node 2 exercise.py

trains digits on 1, 2 or 3 ranks, from the beginning, whatever happens. Change it so that it saves
in CHECKPOINT at SIGTERM and after every SAVE_STEPS steps, and goes on from there when it is started
again, on any of these numbers of ranks.
"""

import gc

import torch
import torch.distributed as dist
from digits import build_model, load_data
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.set_default_dtype(torch.float64)  # 16 digits, so that two trainings can be compared
EPOCHS, BATCH, LR, MOMENTUM = 4, 48, 0.1, 0.9  # BATCH: images per step, over all ranks
CHECKPOINT, SAVE_STEPS = "checkpoint.pt", 10


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, _ = load_data()
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, BATCH // world_size, sampler=sampler, drop_last=True)
    model = build_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(ddp(images), labels).backward()
            optimizer.step()

    if rank == 0:
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
    gc.collect()  # free DDP before the process group that it uses
    dist.destroy_process_group()
