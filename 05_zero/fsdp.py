"""Train the same perceptron with PyTorch's own sharding: FSDP2 for stage 3, and for stage 1 Adam's.

    mpiexec -n 2 python fsdp.py                 # each rank's bytes beside the formula's
    mpiexec -n 4 python fsdp.py --width 4096 --layers 24 --precision bf16

ranks.py is for your own programs, too; workshop.py has this course's flags, data and report.
"""

from datetime import timedelta
from functools import partial
import workshop  # first: it refuses a wrong batch at once, and PyTorch takes seconds

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from accounting import Accounting, held_by_pytorch, pytorch_formula, report_bytes
from flags import check_stage, parse_args
from perceptron import build_model
from ranks import find_ranks, gather, rank_0_first, run
from sharded import load, load_from_rank_0, refuse_sums, save


def shard(model, args, device):
    """Give each rank a shard of each layer, which is gathered for its forward and backward."""
    precision, place = fsdp.MixedPrecisionPolicy(), fsdp.OffloadPolicy()
    if args.precision == "bf16":
        precision = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # reduced in fp32
    if args.offload == "cpu":
        place = fsdp.CPUOffloadPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer in layers:
        fsdp.fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=place)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=place)
    model.to_empty(device=device if args.offload == "none" else "cpu")  # memory for the shards
    for layer in layers:  # one whole layer at a time
        load_from_rank_0(layer, type(layer)(layer.in_features, layer.out_features))
    return model


def batches(dataset, sampler, size, device, drop_last=False):
    """A batch is one dataset[indices], fast with tensors; other data sets want batch_size=size."""
    return DataLoader(dataset, batch_size=None, sampler=BatchSampler(sampler, size, drop_last),
                      pin_memory=device.type != "cpu")  # a GPU can copy it while the CPU goes on


def main():
    # Ranks and device: the launcher has started this program once per rank, each a process.
    args = parse_args(__doc__, stages=(1, 3), stage=3)
    rank, world_size, local_rank = find_ranks()  # my number, how many, my number on this node
    # All ranks meet, at the address that find_ranks() put into os.environ. gloo: CPUs, NCCL: GPUs.
    timeout = timedelta(seconds=args.timeout)  # to wait for a silent rank
    dist.init_process_group(workshop.backend(args), timeout=timeout)
    device = workshop.choose_device(args, local_rank)  # a GPU of its own, or for all the CPU
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)  # from here on, "cuda" is this GPU
        torch.set_float32_matmul_precision("high")  # TF32: fp32 products keep 10 bits of 23
    refuse_sums(device)  # stops where FSDP adds up gradients and does not average them
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    torch.manual_seed(args.seed)

    # Batch and data: each epoch is shuffled and dealt out to the ranks; leftover images stay out.
    args.global_batch_size = args.global_batch_size or world_size * (args.batch_size or 64)
    args.batch_size = args.global_batch_size // world_size  # per rank; check() refuses a remainder
    with rank_0_first(rank):  # rank 0, which may download, then all others
        workshop.check(args, device.type, world_size)
        check_stage(args, device.type, offloads=(3,), saves=(3,))
        train, test = workshop.load_tensors(args)
    std, mean = torch.std_mean(train.tensors[0][:256].to(dtype))

    def standardised(images):
        return (images.to(dtype) - mean) / std

    sampler = DistributedSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    train_batches = batches(train, sampler, args.batch_size, device, drop_last=True)

    # The model and its optimizer.
    with torch.device("meta" if args.stage == 3 else device):  # meta: shapes, and no memory
        model = build_model(args.width, args.layers, train.tensors[0]).to(dtype)
    lr = args.lr * args.global_batch_size / 256  # the linear rule: twice the batch, twice the rate
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model]
    if args.stage == 3:
        wrapped = shard(model, args, device)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    else:  # each rank keeps Adam's state for a part of the parameters
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=lr)
    shards = list(model.parameters())

    # Resume: continue after the epoch that was saved. Every rank reads the file.
    step = 0
    if args.resume:
        with workshop.resuming(args, world_size):
            step = load(model, optimizer, args)

    # Training: each rank has its own batch; averaged gradients make equal steps and parameters.
    epoch_steps = len(train) // args.global_batch_size
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    nodes = gather(local_rank).count(0)  # each node has one local rank 0
    report = workshop.Report("05_zero/fsdp.py", args, device.type, sum(sizes), len(train),
                             rank, world_size, nodes)
    account = Accounting(model, partial(held_by_pytorch, model, shards, optimizer),
                         [*train.tensors, *test.tensors], device)
    watched = step + 1  # the second step from here: Adam has its state
    report.begin(step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        sampler.set_epoch(epoch)  # else every epoch has the same order
        losses, hits = [], []
        for images, labels in report.steps(train_batches):
            images, labels = [part.to(device, non_blocking=True) for part in (images, labels)]
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            if step == watched:
                account.watch()
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16,
                                enabled=args.precision == "bf16" and args.stage == 1):
                logits = wrapped(standardised(images))
                loss = nn.functional.cross_entropy(logits.to(dtype), labels)
            loss.backward()  # each rank gets the averaged gradients of its shards
            if step == watched:
                account.close()
            optimizer.step()
            step += 1
            losses.append(loss.detach())
            hits.append(logits.argmax(1) == labels)
        means = torch.stack([torch.stack(losses).double().mean(), torch.cat(hits).double().mean()])
        dist.all_reduce(means, dist.ReduceOp.SUM)  # every rank calls it and gets the sum
        means /= world_size
        report.epoch(epoch, *means.tolist())  # tolist() waits for the device: once an epoch
        if args.checkpoint and step % epoch_steps == 0:  # every rank saves its shards
            save(model, optimizer, args, step)

    # Evaluation: every test image once, on one of the ranks, and in one batch each: at stage 3
    # the ranks gather layers together, and one with more batches than others would wait for them.
    model.eval()
    images, labels = [part.to(device) for part in test[list(range(rank, len(test), world_size))]]
    with torch.no_grad():
        right = (model(standardised(images)).argmax(1) == labels).sum()
    dist.all_reduce(right, dist.ReduceOp.SUM)
    expected = pytorch_formula(args, world_size, sizes, dtype)
    memory = report_bytes(account, expected)
    report.end(right.item(), len(test), model="perceptron", stage=args.stage, offload=args.offload,
               memory=memory, memory_formula=expected, gradient_bytes=sum(sizes) * dtype.itemsize)
    dist.barrier()  # rank 0 hosts the connections: it waits for all


if __name__ == "__main__":
    run(main)  # calls main(); what fails on one rank ends all: README, "If a rank fails"
