"""Train a small GPT with DeepSpeed's ZeRO: --stage 1, 2 and 3 shard what each rank has at stage 0.

    mpiexec -n 2 python main.py --stage 3
    mpiexec -n 4 python main.py --layers 24 --width 2048 --heads 16 --context 1024 --text synthetic
"""

import faulthandler
import math
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from text import evaluate, generate, load_text
from transformer import parts
from workshop import devices, flags
from workshop.checkpoints import find_latest, save
from workshop.ds_config import exit_on_failure, import_deepspeed, initialize, read_config
from workshop.ending import run
from workshop.ranks import find_ranks
from workshop.report import Report

CONFIG = Path(__file__).with_name("ds_config.json")


def main():
    # Ranks and device: the launcher has started one process of this program per rank.
    rank, world_size, local_rank = find_ranks()  # my number, how many, my number on this node
    parser = flags.make_gpt_parser(__doc__, lr=0.008)
    add = parser.add_argument
    add("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="ZeRO stage (2)")
    add("--offload", choices=("none", "cpu"), default="none",
        help="cpu: keep the optimizer's state in CPU memory (none)")
    args = parser.parse_args()
    device, backend = torch.device("cpu"), "gloo"  # the library that connects CPUs
    gpu = torch.accelerator.current_accelerator(check_available=True)  # cuda, xpu, ... or None
    if args.device != "cpu" and gpu and gpu.type != "mps":
        device = torch.device(gpu.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)  # from here on, "cuda" is this rank's own GPU
        backend = f"cpu:gloo,{gpu.type}:{dist.get_default_backend_for_device(gpu)}"  # cuda: NCCL
        torch.set_float32_matmul_precision("high")  # TF32: chapter 1
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))  # all ranks connect
    device = devices.check_device(args, device)  # the CPU on all ranks, if two would share a GPU
    dtype = torch.float32  # of the parameters; DeepSpeed does not support fp64
    torch.manual_seed(args.seed)

    # Batch and data: shuffled every epoch and split among the ranks; leftovers are dropped.
    block = 12 * args.width**2 + 13 * args.width  # parameters; a bucket holds their gradients
    zero = {"stage": args.stage, "reduce_bucket_size": block,
            "offload_optimizer": {"device": "cpu"} if args.offload == "cpu" else None}
    config, precision = read_config(CONFIG, args.precision, zero)
    micro_batches = world_size * config["gradient_accumulation_steps"]  # per step
    global_batch = args.global_batch_size or micro_batches * args.batch_size
    batch = config["train_micro_batch_size_per_gpu"] = global_batch // micro_batches
    if args.offload == "cpu" and (args.stage == 0 or device.type == "cpu"):
        sys.exit("--offload cpu needs --stage 1, 2 or 3 and a GPU (it saves GPU memory)")
    flags.check(args, device.type, global_batch, micro_batches, precision)
    train, test = load_text(args, global_batch)
    deepspeed = import_deepspeed(device, config)
    compute_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, dtype)
    sampler = DistributedSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    train_batches = DataLoader(train, batch, sampler=sampler, drop_last=True,
                               pin_memory=device.type != "cpu")

    # Model and optimizer.
    shape = {name: getattr(args, name) for name in ("layers", "width", "heads", "context")}
    model = nn.Sequential()
    for part in parts(**shape, checkpointing=args.activation_checkpointing):  # whole, on the CPU
        if args.stage == 3:
            with exit_on_failure("deepspeed.zero.Init()"):  # shards it before the next is created
                deepspeed.zero.Init(part.to(compute_dtype), config_dict_or_path=config)
        model.append(part)
    lr = args.lr * (global_batch / 256) ** 0.5  # square-root rule, for Adam: 2205.10287
    adam = torch.optim.Adam(model.parameters(), lr=lr)
    parameters = sum(getattr(parameter, "ds_numel", parameter.numel())
                     for parameter in model.parameters())  # ds_numel: of a sharded parameter
    engine, optimizer = initialize(deepspeed, model=model, optimizer=adam, config=config)

    # Resume after the last saved epoch. Every rank reads the checkpoint.
    step = 0
    settings = {**shape, "text": args.text or "Python's documentation", "stage": args.stage,
                "global_batch_size": global_batch, "precision": precision, "seed": args.seed}
    if flags.has_checkpoint(args):
        with flags.exit_on_load_error(args):
            engine.load_checkpoint(args.checkpoint, find_latest(args.checkpoint, settings))
            step = engine.global_steps

    # Training: each rank has its own batch; averaged gradients keep all parameters identical.
    epoch_steps = len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    report = Report(args, rank, "sequences", chapter="05_zero", ranks=world_size,
                    device=device.type, nodes=devices.count_nodes(local_rank),
                    dataset=settings["text"], model="GPT", parameters=parameters,
                    batch_size=batch, **settings, offload=args.offload)
    report.start_run(len(train), step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        sampler.set_epoch(epoch)  # else every epoch has the same order
        losses = []
        report.start_epoch()
        for tokens, next_tokens in train_batches:
            tokens = tokens.to(device, non_blocking=True).long()
            next_tokens = next_tokens.to(device, non_blocking=True).long()
            # DeepSpeed's own process groups would wait half an hour. Each call restarts the timer.
            faulthandler.dump_traceback_later(args.timeout, exit=True)
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            logits = engine(tokens).to(dtype)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())
            engine.backward(loss)  # averages on every micro-batch (stages 2 and 3) or on the last
            engine.step()  # updates parameters after the last micro-batch; zeroes gradients
            step = engine.global_steps
            losses.append(loss.detach())
            report.end_step(step)
            if step in (last_step, (epoch + 1) * epoch_steps):  # drop leftover micro-batches
                break
        mean = torch.stack(losses).double().mean() / math.log(2)  # in bits
        dist.all_reduce(mean, dist.ReduceOp.SUM)  # every rank calls it and gets the sum
        report.end_epoch(epoch, mean.item() / world_size)  # item() waits: once per epoch
        if args.checkpoint and step % epoch_steps == 0:  # every rank saves its part
            save(args.checkpoint, settings, step, partial(
                engine.save_checkpoint, args.checkpoint, save_latest=False))

    # Evaluation: each test byte counts once. Ranks that gather blocks need equally many batches.
    model.eval()
    test_loss = evaluate(model, test, global_batch, rank, world_size, device)
    dist.all_reduce(test_loss, dist.ReduceOp.SUM)
    report.print(f"test loss {test_loss:.4f} bits per byte ({len(test)} sequences)")
    report.print(f"it writes: {generate(model, test[0][0].to(device))}")
    report.write_record(test_loss=test_loss.item())
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()  # rank 0 runs the rendezvous server (the store) and has to leave last


if __name__ == "__main__":
    run(main)  # calls main(); if one fails, all end: ../04_deepspeed/README.md, "If a rank fails"
