"""Train an image classifier on many devices with DeepSpeed, which ds_config.json configures.

    mpiexec -n 2 python main.py         # or srun, torchrun, deepspeed; python alone is one rank
"""

import faulthandler
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, default_convert

from workshop import data, devices, flags
from workshop.checkpoints import find_latest, save
from workshop.ds_config import import_deepspeed, initialize, read_config
from workshop.ending import run
from workshop.ranks import find_ranks
from workshop.report import Report

CONFIG = Path(__file__).with_name("ds_config.json")


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
    dtype = torch.float32  # of the parameters; DeepSpeed does not support fp64
    torch.manual_seed(args.seed)

    # Batch and data: shuffled every epoch and split among the ranks; leftover images are dropped.
    config, precision = read_config(CONFIG, args.precision)
    micro_batches = world_size * config["gradient_accumulation_steps"]  # per step
    global_batch = args.global_batch_size or micro_batches * args.batch_size
    batch = config["train_micro_batch_size_per_gpu"] = global_batch // micro_batches
    flags.check(args, device.type, global_batch, micro_batches, precision)
    if rank > 0:
        dist.barrier()  # wait until rank 0, which may download, has loaded the data
    train, test = data.load_data(args, global_batch)
    if rank == 0:
        dist.barrier()
    deepspeed = import_deepspeed(device, config)
    compute_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, dtype)
    mean, std = train.images[:256].mean(), train.images[:256].std()  # 256 are enough
    is_nvidia = device.type == "cuda" and not torch.version.hip
    layout = torch.channels_last if is_nvidia else torch.contiguous_format
    sampler = DistributedSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    options = {"collate_fn": default_convert, "pin_memory": device.type != "cpu"}
    train_batches = DataLoader(train, batch, sampler=sampler, drop_last=True, **options)
    test_batches = DataLoader(test, batch, sampler=range(rank, len(test), world_size), **options)

    # Model and optimizer. DeepSpeed needs contiguous parameters, so not channels_last.
    model = build_model(args.model, train.images.shape[1:]).to(device, dtype)
    lr = args.lr * global_batch / 256  # linear scaling rule: twice the batch, twice the rate
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    engine, optimizer = initialize(deepspeed, model=model, optimizer=optimizer, config=config)

    # Resume after the last saved epoch. Every rank reads the checkpoint.
    step = 0
    settings = {"dataset": args.dataset, "image_size": args.image_size, "model": args.model,
                "global_batch_size": global_batch, "precision": precision, "seed": args.seed}
    if flags.has_checkpoint(args):
        with flags.exit_on_load_error(args):
            engine.load_checkpoint(args.checkpoint, find_latest(args.checkpoint, settings))
            step = engine.global_steps

    # Training: each rank has its own batch; averaged gradients keep all parameters identical.
    epoch_steps = len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    report = Report(args, rank, chapter="04_deepspeed", ranks=world_size, device=device.type,
                    nodes=devices.count_nodes(local_rank), batch_size=batch, **settings,
                    parameters=parameters, gradient_clipping=engine.gradient_clipping())
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
            # DeepSpeed's own process groups would wait half an hour. Each call restarts the timer.
            faulthandler.dump_traceback_later(args.timeout, exit=True)
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            logits = engine(images.to(compute_dtype))
            loss = nn.functional.cross_entropy(logits.to(dtype), labels)
            engine.backward(loss)  # averages over the ranks, on a step's last micro-batch
            engine.step()  # updates parameters after the last micro-batch; zeroes gradients
            step = engine.global_steps
            losses.append(loss.detach())
            hits.append(logits.argmax(1) == labels)
            report.end_step(step)
            if step in (last_step, (epoch + 1) * epoch_steps):  # drop leftover micro-batches
                break
        means = torch.stack([torch.stack(losses).double().mean(), torch.cat(hits).double().mean()])
        dist.all_reduce(means, dist.ReduceOp.SUM)  # every rank calls it and gets the sum
        means /= world_size
        report.end_epoch(epoch, *means.tolist())  # tolist() waits for the device: once per epoch
        if args.checkpoint and step % epoch_steps == 0:  # every rank saves its part
            save(args.checkpoint, settings, step, partial(
                engine.save_checkpoint, args.checkpoint, save_latest=False))

    # Evaluation: every test image once. `model` is enough: only training needs `engine`.
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # BatchNorm statistics differ by rank: use rank 0's
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in test_batches:
            images = (images.to(device).to(dtype) - mean) / std
            correct += (model(images.to(compute_dtype)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct, dist.ReduceOp.SUM)
    report.end_run(correct.item(), len(test), gradient_bytes=parameters * compute_dtype.itemsize)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()  # rank 0 runs the rendezvous server (the store) and has to leave last


if __name__ == "__main__":
    run(main)  # calls main(); if one rank fails, all end: README, "If a rank fails"
