"""Train main.py's perceptron with PyTorch's FSDP2 (fully_shard); stage 1: ZeroRedundancyOptimizer.

    mpiexec -n 2 python fsdp.py                 # each rank's bytes next to the formula's
    mpiexec -n 4 python fsdp.py --width 4096 --layers 24 --precision bf16
"""

import sys
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, default_convert

from accounting import Accounting, pytorch_formula, pytorch_tensors, report_bytes
from perceptron import build_model
from sharded import load, load_from_rank_0, save
from workshop import data, devices, flags
from workshop.ranks import find_ranks, run
from workshop.report import Report


def shard(model, args, device):
    """Shard each layer over the ranks; a layer is gathered for its forward and backward."""
    precision = fsdp.MixedPrecisionPolicy()
    offload = fsdp.OffloadPolicy()
    if args.precision == "bf16":
        precision = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # reduce in fp32
    if args.offload == "cpu":
        offload = fsdp.CPUOffloadPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer in layers:
        fsdp.fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    model.to_empty(device=device if args.offload == "none" else "cpu")  # allocates the shards
    for layer in layers:  # one full layer at a time
        load_from_rank_0(layer, type(layer)(layer.in_features, layer.out_features))
    return model


def main():
    # Ranks and device: the launcher has started one process of this program per rank.
    rank, world_size, local_rank = find_ranks()  # my number, how many, my number on this node
    parser = flags.make_parser(__doc__, lr=0.002)
    add = parser.add_argument
    add("--stage", type=int, choices=(1, 3), default=3, help="ZeRO stage (3)")
    add("--width", type=int, default=1024, help="outputs of each layer (1024)")
    add("--layers", type=int, default=10, help="layers between the first and the last (10)")
    add("--offload", choices=("none", "cpu"), default="none",
        help="cpu: keep each rank's shards in CPU memory (none)")
    args = parser.parse_args()
    device, backend = torch.device("cpu"), "gloo"  # the library that connects CPUs
    if args.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)  # from here on, "cuda" is this rank's own GPU
        backend = "cpu:gloo,cuda:nccl"  # NCCL connects GPUs
        torch.set_float32_matmul_precision("high")  # TF32: chapter 1
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))  # all ranks connect
    device = devices.check_device(args, device)  # the CPU on all ranks, if two would share a GPU
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    torch.manual_seed(args.seed)

    # Batch and data: shuffled every epoch and split among the ranks; leftover images are dropped.
    global_batch = args.global_batch_size or world_size * args.batch_size
    batch = global_batch // world_size  # per rank; flags.check() refuses a remainder
    if args.offload == "cpu" and (args.stage == 1 or device.type == "cpu"):
        sys.exit("--offload cpu needs --stage 3 and a GPU (it saves GPU memory)")
    if args.checkpoint and args.stage == 1:
        sys.exit("--checkpoint needs --stage 3")
    flags.check(args, device.type, global_batch, world_size)
    if rank > 0:
        dist.barrier()  # wait until rank 0, which may download, has loaded the data
    train, test = data.load_data(args, global_batch)
    if rank == 0:
        dist.barrier()
    mean, std = train.images[:256].mean(), train.images[:256].std()  # 256 are enough
    sampler = DistributedSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    train_batches = DataLoader(train, batch, sampler=sampler, drop_last=True,
                               collate_fn=default_convert, pin_memory=device.type == "cuda")

    # Model and optimizer.
    pixels = train.images[0].size  # per image; NumPy's `size` is a number
    with torch.device("meta" if args.stage == 3 else device):  # meta: shapes without memory
        model = build_model(args.width, args.layers, pixels).to(dtype)
    lr = args.lr * global_batch / 256  # linear scaling rule: twice the batch, twice the rate
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model]
    if args.stage == 3:
        parallel_model = shard(model, args, device)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    else:  # each rank keeps Adam's state for a part of the parameters
        parallel_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=lr)
    shards = list(model.parameters())

    # Resume after the last saved epoch. Every rank reads the checkpoint.
    step = 0
    settings = {"dataset": args.dataset, "image_size": args.image_size, "model": "perceptron",
                "stage": args.stage, "width": args.width, "layers": args.layers,
                "global_batch_size": global_batch, "precision": args.precision, "seed": args.seed}
    if flags.has_checkpoint(args):
        with flags.exit_on_load_error(args):
            step = load(model, optimizer, args.checkpoint, settings)

    # Training: each rank has its own batch; averaged gradients keep all parameters identical.
    epoch_steps = len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    report = Report(args, rank, chapter="05_zero/fsdp.py", ranks=world_size, device=device.type,
                    nodes=devices.gather(local_rank).count(0), batch_size=batch, **settings,
                    parameters=sum(sizes),
                    offload=args.offload)
    accounting = Accounting(model, partial(pytorch_tensors, model, shards, optimizer),
                            batch_bytes=4 * train.images.nbytes, device=device)
    counted_step = step + 1  # the second step of this run, when Adam has its state
    report.start_run(len(train), step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        sampler.set_epoch(epoch)  # else every epoch has the same order
        losses, hits = [], []
        report.start_epoch()
        for images, labels in train_batches:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            images = (images.to(dtype) - mean) / std
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            if step == counted_step:
                accounting.start()
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16,
                                enabled=args.precision == "bf16" and args.stage == 1):
                logits = parallel_model(images)
                loss = nn.functional.cross_entropy(logits.to(dtype), labels)
            loss.backward()  # each rank gets the averaged gradients of its shards
            if step == counted_step:
                accounting.stop()
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
        if args.checkpoint and step % epoch_steps == 0:  # every rank saves its shards
            save(model, optimizer, args.checkpoint, settings, step)

    # Evaluation: every test image once, in one batch per rank: at stage 3 all ranks gather each
    # layer together, so a rank with more batches would wait for the others forever.
    model.eval()
    images, labels = test[range(rank, len(test), world_size)]
    images = (torch.from_numpy(images).to(device, dtype) - mean) / std
    with torch.no_grad():
        correct = (model(images).argmax(1) == torch.from_numpy(labels).to(device)).sum()
    dist.all_reduce(correct, dist.ReduceOp.SUM)
    expected = pytorch_formula(args, world_size, sizes, dtype)
    memory = report_bytes(accounting, expected)
    report.end_run(correct.item(), len(test), memory=memory, memory_formula=expected,
                   gradient_bytes=sum(sizes) * dtype.itemsize)
    dist.barrier()  # rank 0 runs the rendezvous server (the store) and has to leave last


if __name__ == "__main__":
    run(main)  # calls main(); if one rank fails, all end: ../03_ddp/README.md, "If a rank fails"
