"""Train an image classifier on many devices with DeepSpeed, which ds_config.json configures.

    mpiexec -n 2 python main.py         # or srun, torchrun, deepspeed; python alone is one rank

ranks.py is for your own programs, too; workshop.py and report.py have this course's flags, data
and measuring.
"""

import faulthandler
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import workshop
from checkpoints import last_saved, save
from ds_config import import_deepspeed, initialize, read_config
from ranks import find_ranks, gather, rank_0_first, run
from report import Report


def build_model(name: str, image_shape: tuple[int, ...]) -> nn.Module:
    if name != "cnn":
        from torchvision.models import get_model
        return get_model(name, num_classes=10)
    channels, side = image_shape[0], (image_shape[-1] - 4) // 2
    return nn.Sequential(  # no BatchNorm, no dropout: any number of ranks trains the same
        nn.Conv2d(channels, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * side * side, 128), nn.ReLU(),
        nn.Linear(128, 10))


def batches(dataset, sampler, size, device, drop_last=False):
    """A batch is one dataset[indices], fast with arrays; other data sets want batch_size=size."""
    return DataLoader(dataset, batch_size=None, sampler=BatchSampler(sampler, size, drop_last),
                      pin_memory=device.type != "cpu")  # a GPU can copy it while the CPU goes on


def main():
    # Ranks and device: the launcher has started this program once per rank, each a process.
    rank, world_size, local_rank = find_ranks()  # my number, how many, my number on this node
    parser = workshop.make_parser(__doc__, lr=0.2)
    parser.add_argument("--model", choices=("cnn", "resnet18", "resnet50"), default="cnn")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    args = parser.parse_args()
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
        config, precision = read_config(args.precision, device.type)
        parts = world_size * config["gradient_accumulation_steps"]  # backward passes in a step
        global_batch = args.global_batch_size or parts * args.batch_size
        batch = config["train_micro_batch_size_per_gpu"] = global_batch // parts  # per backward
        workshop.check(args, device.type, global_batch, parts, precision)
        train, test = workshop.load_data(args, global_batch)
    deepspeed = import_deepspeed(device, config)
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, dtype)
    mean, std = train.images[:256].mean(), train.images[:256].std()
    layout = torch.contiguous_format
    if device.type != "cpu" or precision == "bf16":
        layout = torch.channels_last  # a pixel's channels are neighbours: fast convolutions

    def standardised(images):
        return ((images.to(dtype) - mean) / std).to(compute, memory_format=layout)

    sampler = DistributedSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    train_batches = batches(train, sampler, batch, device, drop_last=True)
    test_batches = batches(test, range(rank, len(test), world_size), batch, device)

    # The model and its optimizer.
    model = build_model(args.model, train.images.shape[1:]).to(device, dtype)  # plain strides
    if args.compile:
        model.compile()
    lr = args.lr * global_batch / 256  # the linear rule: twice the batch, twice the rate
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    engine, optimizer = initialize(deepspeed, model=model, optimizer=optimizer, config=config)

    # Resume: continue after the epoch that was saved. Every rank reads the file.
    step = 0
    training = {"dataset": args.dataset, "image_size": args.image_size, "model": args.model,
                "global_batch_size": global_batch, "precision": precision, "seed": args.seed}
    if workshop.resumes(args):
        with workshop.resuming(args):
            engine.load_checkpoint(args.checkpoint, last_saved(args.checkpoint, training))
            step = engine.global_steps

    # Training: each rank has its own batch; averaged gradients make equal steps and parameters.
    epoch_steps = len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    nodes = gather(local_rank).count(0)  # each node has one local rank 0
    report = Report(args, rank, chapter="04_deepspeed", ranks=world_size, nodes=nodes,
                    device=device.type, **training, batch_size=batch,
                    parameters=parameters, gradient_clipping=engine.gradient_clipping())
    report.begin(len(train), step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        sampler.set_epoch(epoch)  # else every epoch has the same order
        losses, hits = [], []
        report.start()
        for images, labels in train_batches:
            images, labels = [part.to(device, non_blocking=True) for part in (images, labels)]
            # DeepSpeed's own groups wait for half an hour. Each call restarts the clock.
            faulthandler.dump_traceback_later(args.timeout, exit=True)
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            logits = engine(standardised(images))
            loss = nn.functional.cross_entropy(logits.to(dtype), labels)
            engine.backward(loss)  # the last of the accumulated ones averages over the ranks
            engine.step()  # changes parameters after the last one; zeroes the gradients
            step = engine.global_steps
            losses.append(loss.detach())
            hits.append(logits.argmax(1) == labels)
            report.step(step)
            if step in (last_step, (epoch + 1) * epoch_steps):  # leftover micro-batches stay out
                break
        means = torch.stack([torch.stack(losses).double().mean(), torch.cat(hits).double().mean()])
        dist.all_reduce(means, dist.ReduceOp.SUM)  # every rank calls it and gets the sum
        means /= world_size
        report.epoch(epoch, *means.tolist())  # tolist() waits for the device: once an epoch
        if args.checkpoint and step % epoch_steps == 0:  # every rank saves its part
            save(args.checkpoint, training, step, partial(
                engine.save_checkpoint, args.checkpoint, save_latest=False))
    faulthandler.cancel_dump_traceback_later()

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
