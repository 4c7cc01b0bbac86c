"""Train a perceptron with ZeRO: --stage 1, 2 and 3 shard what every rank holds at stage 0.

    mpiexec -n 2 python main.py --stage 3       # each rank's bytes next to the formula's
    mpiexec -n 4 python main.py --stage 2 --width 4096 --layers 24 --precision bf16
"""

import faulthandler
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, default_convert

from accounting import Accounting, deepspeed_formula, deepspeed_tensors, layer_sizes, report_bytes
from perceptron import build_model
from workshop import data, devices, flags
from workshop.checkpoints import find_latest, save
from workshop.ds_config import import_deepspeed, initialize, read_config
from workshop.ranks import find_ranks, run
from workshop.report import Report

CONFIG = Path(__file__).with_name("ds_config.json")


def zero_options(args):
    """Return the zero_optimization section of DeepSpeed's configuration."""
    return {"stage": args.stage, "reduce_bucket_size": args.width * (args.width + 1),  # one layer
            "offload_optimizer": {"device": "cpu"} if args.offload == "cpu" else None}


def main():
    # Ranks and device: the launcher has started one process of this program per rank.
    rank, world_size, local_rank = find_ranks()  # my number, how many, my number on this node
    parser = flags.make_parser(__doc__, lr=0.002)
    add = parser.add_argument
    add("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="ZeRO stage (2)")
    add("--width", type=int, default=1024, help="outputs of each layer (1024)")
    add("--layers", type=int, default=10, help="layers between the first and the last (10)")
    add("--offload", choices=("none", "cpu"), default="none",
        help="cpu: keep the optimizer's state in CPU memory (none)")
    args = parser.parse_args()
    device, backend = torch.device("cpu"), "gloo"  # the library that connects CPUs
    if args.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)  # from here on, "cuda" is this rank's own GPU
        backend = "cpu:gloo,cuda:nccl"  # NCCL connects GPUs
        torch.set_float32_matmul_precision("high")  # TF32: chapter 1
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))  # all ranks connect
    device = devices.check_device(args, device)  # the CPU on all ranks, if two would share a GPU
    dtype = torch.float32  # of the parameters; DeepSpeed does not support fp64
    torch.manual_seed(args.seed)

    # Batch and data: shuffled every epoch and split among the ranks; leftover images are dropped.
    config, precision = read_config(CONFIG, args.precision, device.type, zero_options(args))
    micro_batches = world_size * config["gradient_accumulation_steps"]  # per step
    global_batch = args.global_batch_size or micro_batches * args.batch_size
    batch = config["train_micro_batch_size_per_gpu"] = global_batch // micro_batches
    if args.offload == "cpu" and (args.stage == 0 or device.type == "cpu"):
        sys.exit("--offload cpu needs --stage 1, 2 or 3 and a GPU (it saves GPU memory)")
    flags.check(args, device.type, global_batch, micro_batches, precision)
    if rank > 0:
        dist.barrier()  # wait until rank 0, which may download, has loaded the data
    train, test = data.load_data(args, global_batch)
    if rank == 0:
        dist.barrier()
    deepspeed = import_deepspeed(device, config)
    compute_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, dtype)
    mean, std = train.images[:256].mean(), train.images[:256].std()  # 256 are enough
    sampler = DistributedSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    train_batches = DataLoader(train, batch, sampler=sampler, drop_last=True,
                               collate_fn=default_convert, pin_memory=device.type == "cuda")

    # Model and optimizer.
    pixels = train.images[0].size  # per image; NumPy's `size` is a number
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.stage == 3):
        model = build_model(args.width, args.layers, pixels)  # sharded at stage 3
    lr = args.lr * global_batch / 256  # linear scaling rule: twice the batch, twice the rate
    adam = torch.optim.Adam(model.parameters(), lr=lr)
    sizes = layer_sizes(model)
    engine, optimizer = initialize(deepspeed, model=model, optimizer=adam, config=config)

    # Resume after the last saved epoch. Every rank reads the checkpoint.
    step = 0
    settings = {"dataset": args.dataset, "image_size": args.image_size, "model": "perceptron",
                "stage": args.stage, "width": args.width, "layers": args.layers,
                "global_batch_size": global_batch, "precision": precision, "seed": args.seed}
    if flags.has_checkpoint(args):
        with flags.exit_on_load_error(args):
            engine.load_checkpoint(args.checkpoint, find_latest(args.checkpoint, settings))
            step = engine.global_steps

    # Training: each rank has its own batch; averaged gradients keep all parameters identical.
    epoch_steps = len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    report = Report(args, rank, chapter="05_zero", ranks=world_size, device=device.type,
                    nodes=devices.gather(local_rank).count(0), batch_size=batch, **settings,
                    parameters=sum(sizes),
                    offload=args.offload, gradient_clipping=engine.gradient_clipping())
    accounting = Accounting(model, partial(deepspeed_tensors, model, optimizer, adam),
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
            images = ((images.to(dtype) - mean) / std).to(compute_dtype)
            # DeepSpeed's own process groups would wait half an hour. Each call restarts the timer.
            faulthandler.dump_traceback_later(args.timeout, exit=True)
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            if step == counted_step:
                accounting.start()
            logits = engine(images)
            loss = nn.functional.cross_entropy(logits.to(dtype), labels)
            engine.backward(loss)  # averages on every micro-batch (stages 2 and 3) or on the last
            if step == counted_step and engine.is_gradient_accumulation_boundary():
                accounting.stop()
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

    # Evaluation: every test image once, in one batch per rank: at stage 3 all ranks gather each
    # layer together, so a rank with more batches would wait for the others forever.
    model.eval()
    images, labels = test[range(rank, len(test), world_size)]
    images = ((torch.from_numpy(images).to(device, dtype) - mean) / std).to(compute_dtype)
    with torch.no_grad():
        correct = (model(images).argmax(1) == torch.from_numpy(labels).to(device)).sum()
    dist.all_reduce(correct, dist.ReduceOp.SUM)
    expected = deepspeed_formula(args, world_size, sizes, compute_dtype)
    memory = report_bytes(accounting, expected)
    report.end_run(correct.item(), len(test), memory=memory, memory_formula=expected,
                   gradient_bytes=sum(sizes) * compute_dtype.itemsize)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()  # rank 0 runs the rendezvous server (the store) and has to leave last


if __name__ == "__main__":
    run(main)  # calls main(); if one fails, all end: ../04_deepspeed/README.md, "If a rank fails"
