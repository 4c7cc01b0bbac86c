"""Find the deadlock and fix it.

    torchrun --nproc-per-node 2 exercise.py

trains digits on two ranks, and should save in best.pt the network of the epoch with the lowest loss
over all validation images, with that loss and accuracy. But after some epochs it hangs.
"""

import gc

import torch
import torch.distributed as dist
from digits import build_model, load_data
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

torch.set_default_dtype(torch.float64)  # 16 digits, so that two trainings can be compared
EPOCHS, BATCH, LR, MOMENTUM = 9, 64, 0.2, 0.9


def save(model, epoch, loss, correct):
    """Save the model, with the accuracy over all ranks' validation images.

    correct: a boolean for each of this rank's validation images
    """
    tensors = [torch.empty_like(correct) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, correct)
    accuracy = torch.cat(tensors).double().mean().item()
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch, "loss": loss.item(), "accuracy": accuracy,
                    "model": model.state_dict()}, "best.pt")


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, valid = load_data()
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, BATCH // world_size, sampler=sampler, drop_last=True)
    model = build_model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    local_images, local_labels = valid[rank::world_size]  # this rank's share
    lowest = float("inf")

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(ddp(images), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(local_images)
            loss = cross_entropy(logits, local_labels)
        if loss < lowest:
            lowest = loss
            save(model, epoch, loss, logits.argmax(1) == local_labels)


if __name__ == "__main__":
    main()
    gc.collect()  # free DDP before the process group that it uses
    dist.destroy_process_group()
