"""Train an image classifier on many devices with DeepSpeed, which ds_config.json configures.

    mpiexec -n 2 python main.py         # or srun, torchrun, deepspeed; python alone is one rank

ranks.py is for your own programs, too; workshop.py has this course's flags, data and report.
"""

from datetime import timedelta
from functools import partial
import workshop  # first: it refuses a wrong batch at once, and PyTorch takes seconds

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from checkpoints import last_saved, save
from ds_config import import_deepspeed, initialize, read_config
from ranks import alarm, find_ranks, gather, rank_0_first, run


def build_model(name: str, images: torch.Tensor) -> nn.Module:
    if name != "cnn":
        from torchvision.models import get_model
        return get_model(name, num_classes=10)
    channels, side = images.shape[1], (images.shape[-1] - 4) // 2
    return nn.Sequential(  # no BatchNorm, no dropout: any number of ranks trains the same
        nn.Conv2d(channels, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * side * side, 128), nn.ReLU(),
        nn.Linear(128, 10))


def batches(dataset, sampler, size, device, drop_last=False):
    """A batch is one dataset[indices], fast with tensors; other data sets want batch_size=size."""
    return DataLoader(dataset, batch_size=None, sampler=BatchSampler(sampler, size, drop_last),
                      pin_memory=device.type != "cpu")  # a GPU can copy it while the CPU goes on


def main():
    # Ranks and device: the launcher has started this program once per rank, each a process.
    args = workshop.parse_args(__doc__)
    rank, world_size, local_rank = find_ranks()  # my number, how many, my number on this node
    # All ranks meet, at the address that find_ranks() put into os.environ. gloo: CPUs, NCCL: GPUs.
    timeout = timedelta(seconds=args.timeout)  # to wait for a silent rank
    dist.init_process_group(workshop.backend(args), timeout=timeout)
    device = workshop.choose_device(args, local_rank)  # a GPU of its own, or for all the CPU
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)  # from here on, "cuda" is this GPU
        torch.set_float32_matmul_precision("high")  # TF32: fp32 products keep 10 bits of 23
        torch.backends.cudnn.benchmark = True  # try each algorithm of a convolution once
    dtype = torch.float32  # of parameters; DeepSpeed has no fp64
    torch.manual_seed(args.seed)

    # Batch and data: each epoch is shuffled and dealt out to the ranks; leftover images stay out.
    with rank_0_first(rank):  # rank 0, which may download, then all others
        config = read_config(args, device.type)
        accumulation = config["gradient_accumulation_steps"]  # backward passes in a step
        parts = world_size * accumulation
        args.global_batch_size = args.global_batch_size or parts * (args.batch_size or 64)
        args.batch_size = config["train_micro_batch_size_per_gpu"] = args.global_batch_size // parts
        workshop.check(args, device.type, world_size, accumulation)
        train, test = workshop.load_tensors(args)
    deepspeed = import_deepspeed(device)
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision, dtype)
    layout = workshop.memory_format(args, device.type)
    std, mean = torch.std_mean(train.tensors[0][:256].to(dtype))

    def standardised(images):
        return ((images.to(dtype) - mean) / std).to(compute, memory_format=layout)

    sampler = DistributedSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    train_batches = batches(train, sampler, args.batch_size, device, drop_last=True)
    test_batches = batches(test, range(rank, len(test), world_size), args.batch_size, device)

    # The model and its optimizer.
    model = build_model(args.model, train.tensors[0]).to(device, dtype)  # DeepSpeed: plain strides
    if args.compile:
        model.compile()
    lr = args.lr * args.global_batch_size / 256  # the linear rule: twice the batch, twice the rate
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)
    engine, optimizer = initialize(deepspeed, model=model, optimizer=optimizer, config=config)

    # Resume: continue after the epoch that was saved. Every rank reads the file.
    step = 0
    if args.resume:
        with workshop.resuming(args, world_size):
            engine.load_checkpoint(args.checkpoint, last_saved(args))
            step = engine.global_steps

    # Training: each rank has its own batch; averaged gradients make equal steps and parameters.
    epoch_steps = len(train) // args.global_batch_size
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    nodes = gather(local_rank).count(0)  # each node has one local rank 0
    report = workshop.Report("04_deepspeed", args, device.type, parameters, len(train),
                             rank, world_size, nodes)
    report.begin(step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        sampler.set_epoch(epoch)  # else every epoch has the same order
        losses, hits = [], []
        for images, labels in report.steps(train_batches, accumulation):
            images, labels = [part.to(device, non_blocking=True) for part in (images, labels)]
            alarm(args.timeout)  # DeepSpeed's own groups wait for half an hour
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            logits = engine(standardised(images))
            loss = nn.functional.cross_entropy(logits.to(dtype), labels)
            engine.backward(loss)  # the last of the accumulated ones averages over the ranks
            engine.step()  # changes parameters after the last one; zeroes the gradients
            step = engine.global_steps
            losses.append(loss.detach())
            hits.append(logits.argmax(1) == labels)
        means = torch.stack([torch.stack(losses).double().mean(), torch.cat(hits).double().mean()])
        dist.all_reduce(means, dist.ReduceOp.SUM)  # every rank calls it and gets the sum
        means /= world_size
        report.epoch(epoch, *means.tolist())  # tolist() waits for the device: once an epoch
        if args.checkpoint and step % epoch_steps == 0:  # every rank saves its part
            save(args, step, partial(engine.save_checkpoint, args.checkpoint, save_latest=False))
    alarm(0)

    # Evaluation: every test image once. Not through `engine`: ranks may have more or fewer batches.
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # BatchNorm's statistics differ by rank: all take rank 0's
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in test_batches:
            right += (model(standardised(images.to(device))).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(right, dist.ReduceOp.SUM)
    report.end(right.item(), len(test), gradient_bytes=parameters * compute.itemsize)
    dist.barrier()  # rank 0 hosts the connections: it waits for all


if __name__ == "__main__":
    run(main)  # calls main(); what fails on one rank ends all: README, "If a rank fails"
