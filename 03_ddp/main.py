"""Train an image classifier on many devices with PyTorch's DistributedDataParallel (DDP).

    mpiexec -n 2 python main.py    # or torchrun --nproc-per-node 2 main.py, or srun, or python
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, default_convert

from workshop import data, devices, flags
from workshop.ending import run
from workshop.ranks import find_ranks
from workshop.report import Report


def build_model(name: str, image_shape: tuple[int, ...]) -> nn.Module:
    if name != "cnn":
        from torchvision.models import get_model
        return get_model(name, num_classes=10)
    channels, side = image_shape[0], (image_shape[-1] - 4) // 2
    return nn.Sequential(  # no BatchNorm or dropout: the result is the same on any number of ranks
        nn.Conv2d(channels, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * side * side, 128), nn.ReLU(),
        nn.Linear(128, 10))


def main():
    # Ranks and device: the launcher has started one process of this program per rank.
    rank, world_size, local_rank = find_ranks()  # my number, how many, my number on this node
    parser = flags.make_parser(__doc__, lr=0.2)
    parser.add_argument("--model", choices=("cnn", "resnet18", "resnet50"), default="cnn")
    parser.add_argument("--profile", metavar="FILE", help="trace of steps 6 to 8, for perfetto.dev")
    args = parser.parse_args()
    device, backend = torch.device("cpu"), "gloo"  # the library that connects CPUs
    gpu = torch.accelerator.current_accelerator(check_available=True)  # cuda, xpu, ... or None
    if args.device != "cpu" and gpu and gpu.type != "mps":
        device = torch.device(gpu.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)  # from here on, "cuda" is this rank's own GPU
        backend = f"cpu:gloo,{gpu.type}:{dist.get_default_backend_for_device(gpu)}"  # cuda: NCCL
        torch.set_float32_matmul_precision("high")  # TF32: chapter 1
        torch.backends.cudnn.benchmark = not torch.version.hip
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))  # all ranks connect
    device = devices.check_device(args, device)  # the CPU on all ranks, if two would share a GPU
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    torch.manual_seed(args.seed)

    # Batch and data: shuffled every epoch and split among the ranks; leftover images are dropped.
    global_batch = args.global_batch_size or world_size * args.batch_size
    batch = global_batch // world_size  # per rank; flags.check() refuses a remainder
    flags.check(args, device.type, global_batch, world_size)
    if rank > 0:
        dist.barrier()  # wait until rank 0, which may download, has loaded the data
    train, test = data.load_data(args, global_batch)
    if rank == 0:
        dist.barrier()
    mean, std = train.images[:256].mean(), train.images[:256].std()  # 256 are enough
    is_nvidia = device.type == "cuda" and not torch.version.hip
    layout = torch.channels_last if is_nvidia else torch.contiguous_format
    sampler = DistributedSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    options = {"collate_fn": default_convert, "pin_memory": device.type != "cpu"}
    train_batches = DataLoader(train, batch, sampler=sampler, drop_last=True, **options)
    test_batches = DataLoader(test, batch, sampler=range(rank, len(test), world_size), **options)

    # Model and optimizer.
    model = build_model(args.model, train.images.shape[1:]).to(device, dtype, memory_format=layout)
    ddp = DistributedDataParallel(model)  # broadcasts rank 0's parameters; train through it
    lr = args.lr * global_batch / 256  # linear scaling rule: twice the batch, twice the rate
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    # Resume after the last saved epoch. Every rank reads the checkpoint.
    step = 0
    settings = {"dataset": args.dataset, "image_size": args.image_size, "model": args.model,
                "global_batch_size": global_batch, "precision": args.precision, "seed": args.seed}
    if flags.has_checkpoint(args):
        with flags.exit_on_load_error(args):
            checkpoint = torch.load(args.checkpoint, map_location="cpu")
            flags.refuse_other_settings(checkpoint["settings"], settings)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            step = checkpoint["step"]

    # Training: each rank has its own batch; averaged gradients keep all parameters identical.
    epoch_steps = len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    report = Report(args, rank, chapter="03_ddp", ranks=world_size, device=device.type,
                    nodes=devices.count_nodes(local_rank), batch_size=batch, **settings,
                    parameters=sum(parameter.numel() for parameter in model.parameters()))
    report.start_run(len(train), step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        sampler.set_epoch(epoch)  # else every epoch has the same order
        losses, hits = [], []
        report.start_epoch()
        for images, labels in train_batches:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            images = ((images.to(dtype) - mean) / std).to(memory_format=layout)
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                logits = ddp(images)
                loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()  # meanwhile DDP averages the gradients over the ranks
            optimizer.step()
            step += 1
            losses.append(loss.detach())
            hits.append(logits.argmax(1) == labels)
            report.end_step(step)
            if step == last_step:  # --max-steps
                break
        means = torch.stack([torch.stack(losses).double().mean(), torch.cat(hits).double().mean()])
        dist.all_reduce(means, dist.ReduceOp.SUM)  # every rank calls it and gets the sum
        means /= world_size
        report.end_epoch(epoch, *means.tolist())  # tolist() waits for the device: once per epoch
        if args.checkpoint and step % epoch_steps == 0 and rank == 0:  # ranks have the same state
            state = {"settings": settings, "step": step,
                     "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)  # never a half-written file

    # Evaluation: every test image once. Not through `ddp`: it may wait for a rank without a batch.
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # BatchNorm statistics differ by rank: use rank 0's
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in test_batches:
            images = (images.to(device).to(dtype) - mean) / std
            correct += (model(images).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct, dist.ReduceOp.SUM)
    report.end_run(correct.item(), len(test))
    dist.barrier()  # rank 0 runs the rendezvous server (the store) and has to leave last


if __name__ == "__main__":
    run(main)  # calls main(); if one rank fails, all end: README, "If a rank fails"
