"""Train an image classifier on many devices with DeepSpeed, which ds_config.json configures.

    mpiexec -n 2 python main.py         # or srun, torchrun, deepspeed; python alone is one rank
    mpiexec -n 4 python main.py --dataset svhn --model resnet50 --batch-size 512 --max-steps 40

ranks.py and workshop.py beside it are the same in every chapter.
"""

import os
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import workshop
from checkpoints import load, save
from ds_config import import_deepspeed, initialize, read_config
from ranks import find_ranks, gather, rank_0_first, run


def build_model(name, images):
    if name != "cnn":
        from torchvision.models import get_model
        return get_model(name, num_classes=10)
    channels, side = images.shape[1], (images.shape[-1] - 4) // 2
    return nn.Sequential(  # no BatchNorm, no dropout: a batch's gradient is the mean of its parts'
        nn.Conv2d(channels, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * side * side, 128), nn.ReLU(),
        nn.Linear(128, 10))


def batches(dataset, sampler, size, drop_last=False):
    """A batch is one slice of the data set: no Python runs for each image."""
    return DataLoader(dataset, batch_size=None, sampler=BatchSampler(sampler, size, drop_last))


def main():
    # Ranks and device: the launcher has started this program once per rank, each a process.
    args = workshop.parse_args(__doc__)
    rank, ranks, local_rank = find_ranks()  # 0 to ranks - 1, and which of them on this node
    device = torch.device("cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())  # a rank may see its own only
    elif ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks share the cores of their node
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")  # all meet
    workshop.refuse_shared_gpus(device.type)
    dtype = torch.float32  # of parameters; DeepSpeed has no fp64
    torch.manual_seed(args.seed)

    # Batch and data: every image once an epoch, in a new order, on one of the ranks.
    with rank_0_first(rank):  # it may have to download
        config = read_config(args, device.type)
        accumulation = config["gradient_accumulation_steps"]  # backward passes in a step
        parts = ranks * accumulation
        args.global_batch_size = args.global_batch_size or parts * (args.batch_size or 64)
        args.batch_size = config["train_micro_batch_size_per_gpu"] = args.global_batch_size // parts
        workshop.check(args, device.type, rank, ranks, accumulation)
        train, test = workshop.load_tensors(args, device)
    deepspeed = import_deepspeed(device.type)
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision, dtype)
    std, mean = torch.std_mean(train.tensors[0][:256].to(dtype))

    def standardised(images):
        return ((images.to(dtype) - mean) / std).to(compute)

    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)  # every N-th of one order
    train_batches = batches(train, sampler, args.batch_size, drop_last=True)
    test_batches = batches(test, range(rank, len(test), ranks), args.batch_size)

    # The model, wrapped, and its optimizer.
    model = build_model(args.model, train.tensors[0]).to(device, dtype)
    lr = args.lr * args.global_batch_size / 256  # the linear rule: twice the batch, twice the rate
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    engine, optimizer = initialize(deepspeed, model=model, optimizer=optimizer, config=config)

    # Resume: go on where a checkpoint was saved. Every rank reads it.
    step = 0
    if args.resume:
        with workshop.resuming(args):
            workshop.refuse_other(load(engine, args.checkpoint), args)
            step = engine.global_steps

    # Training: each rank with its own batch, all with the same parameters.
    epoch_steps = len(train) // args.global_batch_size
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    report = workshop.Report("04_deepspeed", args, device.type, parameters, len(train),
                             rank, ranks, nodes=gather(local_rank).count(0))
    report.begin(step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        sampler.set_epoch(epoch)  # another order each epoch
        first, end = step % epoch_steps, min(epoch_steps, last_step - epoch * epoch_steps)
        loss_sum, hits = torch.zeros(2, dtype=torch.float64, device=device)
        passes = range(first * accumulation, end * accumulation)
        passed = islice(train_batches, passes.start, passes.stop)
        for images, labels in report.steps(passed, len(passes), accumulation):
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            logits = engine(standardised(images))
            loss = cross_entropy(logits, labels)
            engine.backward(loss)  # the last of the accumulated ones averages over the ranks
            engine.step()  # changes parameters after that one; zeroes the gradients
            step = engine.global_steps
            loss_sum += loss.detach()
            hits += (logits.argmax(1) == labels).sum()
        means = torch.stack([loss_sum, hits / args.batch_size]) / len(passes)
        dist.all_reduce(means, dist.ReduceOp.SUM)
        means /= ranks
        report.epoch(epoch, *means.tolist())  # the first look: until here the device runs free
        if args.checkpoint:  # every rank saves its part
            save(engine, args.checkpoint, workshop.training_of(args))

    # Evaluation: every test image once, on one of the ranks.
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # BatchNorm's statistics differ by rank: all take rank 0's
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in test_batches:
            right += (model(standardised(images)).argmax(1) == labels).sum()
    dist.all_reduce(right, dist.ReduceOp.SUM)
    report.end(right.item(), len(test), gradient_bytes=parameters * compute.itemsize)
    dist.barrier()  # nobody leaves while others still talk; run() then closes the process group


if __name__ == "__main__":
    run(main)
