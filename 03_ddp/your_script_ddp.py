"""Train a small network on handwritten digits, on many GPUs: your_script.py with the marked lines.

    python your_script_ddp.py                            # one rank
    mpiexec -n 2 python your_script_ddp.py               # or
    torchrun --nproc-per-node 2 your_script_ddp.py       # or
    srun -n 2 --kill-on-bad-exit=1 python your_script_ddp.py

In another folder, put a copy of ranks.py next to this file, and import from `ranks`. Lines marked
RESUME: with --checkpoint FILE a job goes on where SIGTERM stopped the last one, on any number of
ranks.
"""

import argparse
import os
import signal
from itertools import islice

import torch
import torch.distributed as dist  # DDP
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split  # DDP

from workshop.ranks import find_ranks, refuse  # DDP: `from ranks import`, in another folder


def load():
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16
    return random_split(TensorDataset(images, torch.tensor(labels)), [1437, 360])


def gather(value):  # DDP: the values of all ranks, on every rank
    values = [None] * dist.get_world_size()  # DDP
    dist.all_gather_object(values, value)  # DDP: every rank has to call it
    return values  # DDP


def ignore_sigterm(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def save(file, state):  # RESUME: every rank calls it; rank 0 writes
    generators = [torch.get_rng_state()]  # RESUME: of dropout, noise, ...
    if torch.accelerator.is_available():
        generators.append(torch.get_device_module().get_rng_state())
    state["generators"] = gather(generators)
    if dist.get_rank() == 0:
        torch.save(state, f"{file}.tmp")
        os.replace(f"{file}.tmp", file)  # RESUME: never a half-written file


def set_generators(saved):
    if len(saved) == dist.get_world_size():  # RESUME: else this job draws other random numbers
        state, *gpu_state = saved[dist.get_rank()]
        torch.set_rng_state(state)
        if gpu_state and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(*gpu_state)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", metavar="FILE", help="save into FILE, and resume from it")
    args = parser.parse_args()
    find_ranks()  # DDP: for mpiexec and srun; it sets the variables that torchrun sets
    local_rank = int(os.environ["LOCAL_RANK"])  # DDP: my number on this node
    device, backend = torch.device("cpu"), "gloo"  # DDP: the library that connects CPUs
    gpu = torch.accelerator.current_accelerator(check_available=True)  # cuda, xpu, ... or None
    if gpu and gpu.type != "mps":
        device = torch.device(gpu.type, local_rank % torch.accelerator.device_count())  # DDP
        torch.accelerator.set_device_index(device)  # DDP: from here on, "cuda" is this GPU
        backend = f"cpu:gloo,{gpu.type}:{dist.get_default_backend_for_device(gpu)}"  # DDP: NCCL
    dist.init_process_group(backend)  # DDP: all ranks connect
    rank, world_size = dist.get_rank(), dist.get_world_size()  # DDP
    if 64 % world_size:
        refuse("the ranks have to divide 64, the images per step")  # rank 0 prints it
    torch.manual_seed(0)
    if rank == 0:  # DDP: one rank prints; flush, as output to a launcher is buffered
        print(f"{world_size} ranks on {device}", flush=True)  # DDP

    train, test = load()
    sampler = DistributedSampler(train, drop_last=True)  # DDP: shuffles, and splits the images
    generator = torch.Generator()  # RESUME: the workers' own; dropout has another one
    train_loader = DataLoader(train, batch_size=64 // world_size,  # DDP: per rank; 64 in all
                              sampler=sampler,  # DDP: instead of shuffle=True
                              generator=generator,
                              drop_last=True, num_workers=1,  # DDP: per rank
                              multiprocessing_context="spawn",  # DDP: with gloo a fork may hang
                              worker_init_fn=ignore_sigterm,  # RESUME: they get it, too
                              persistent_workers=True)  # DDP: spawned workers start slowly
    test_loader = DataLoader(test, batch_size=64, sampler=range(rank, len(test), world_size))  # DDP

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 6 * 6, 64), nn.ReLU(),
        nn.Linear(64, 10)).to(device)
    ddp = nn.parallel.DistributedDataParallel(model)  # DDP: averages gradients
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    step, loss_sum, checkpoints = 0, 0.0, [None]
    # RESUME: a scheduler sends SIGTERM before it ends the job
    sigterms = []
    if args.checkpoint:
        signal.signal(signal.SIGTERM, lambda *_: sigterms.append(True))
    if rank == 0 and args.checkpoint and os.path.exists(args.checkpoint):
        checkpoints = [torch.load(args.checkpoint, map_location="cpu")]
    dist.broadcast_object_list(checkpoints, 0)  # RESUME: rank 0 reads the file for all ranks
    if saved := checkpoints[0]:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        loss_sum = saved["loss_sum"] if step % len(train_loader) else 0.0
        set_generators(saved["generators"])
    for epoch in range(step // len(train_loader), 5):
        sampler.set_epoch(epoch)  # DDP: or each epoch has the same order
        generator.manual_seed(epoch * world_size + rank)  # RESUME: the same in another job
        model.train()
        trained = step % len(train_loader)  # RESUME: reads these batches again, and drops them
        for images, labels in islice(train_loader, trained, None):
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = cross_entropy(ddp(images), labels)  # DDP: ddp, not model
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
            step += 1
            if args.checkpoint and step % 5 == 0:  # RESUME: all ranks decide at the same step
                is_last = any(gather(bool(sigterms)))
                if is_last or step % 20 == 0:
                    save(args.checkpoint, {
                        "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "step": step, "loss_sum": sum(gather(loss_sum)) / world_size})
                if is_last:
                    return
        loss_sum = sum(gather(loss_sum)) / world_size  # DDP: the mean over the ranks
        if rank == 0:  # DDP
            print(f"epoch {epoch + 1}: loss {loss_sum / len(train_loader):.4f}", flush=True)
        loss_sum = 0.0

    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(1) == labels).sum().item()
    correct = sum(gather(correct))  # DDP: summed over ranks: each image counts once
    if rank == 0:  # DDP: one rank saves model, not ddp: no "module." in the names
        print(f"test accuracy {correct / len(test):.4f}")
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # DDP: after main(), which holds the DDP object
