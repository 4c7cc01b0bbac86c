"""Train a small GPT with PyTorch's FSDP2 (fully_shard), which shards as ZeRO's stage 3 does.

    mpiexec -n 2 python fsdp.py
    mpiexec -n 4 python fsdp.py --layers 24 --width 2048 --heads 16 --context 1024 --text synthetic
"""

import faulthandler
import math
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

from sharded import load, load_from_rank_0, save
from text import evaluate, generate, load_text
from transformer import parts
from workshop import devices, flags
from workshop.ending import run
from workshop.ranks import find_ranks
from workshop.report import Report


def shard(model, whole_parts, args, device):
    """Shard each block over the ranks; a block is gathered for its forward and its backward."""
    bf16 = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # reduces in fp32
    precision = bf16 if args.precision == "bf16" else fsdp.MixedPrecisionPolicy()
    offload = fsdp.CPUOffloadPolicy() if args.offload == "cpu" else fsdp.OffloadPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if args.replicas > 1:  # HSDP: each group of consecutive ranks, such as a node, has all shards
        mesh = init_device_mesh(device.type, (args.replicas, mesh.size() // args.replicas),
                                mesh_dim_names=("replicate", "shard"))
    for part in model:  # the embedding, the blocks, the head
        fsdp.fully_shard(part, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    model.to_empty(device=device if args.offload == "none" else "cpu")  # allocates the shards
    for part, whole in zip(model, whole_parts):  # creates one whole part at a time
        load_from_rank_0(part, whole)


def main():
    # Ranks and device: the launcher has started one process of this program per rank.
    rank, world_size, local_rank = find_ranks()  # my number, how many, my number on this node
    parser = flags.make_gpt_parser(__doc__, lr=0.008)
    add = parser.add_argument
    add("--replicas", type=int, default=1, help="groups of ranks of which each has all shards (1)")
    add("--offload", choices=("none", "cpu"), default="none",
        help="cpu: keep each rank's shards in CPU memory (none)")
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
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    torch.manual_seed(args.seed)

    # Batch and data: shuffled every epoch and split among the ranks; leftovers are dropped.
    global_batch = args.global_batch_size or world_size * args.batch_size
    batch = global_batch // world_size  # per rank; flags.check() refuses a remainder
    if args.offload == "cpu" and device.type == "cpu":
        sys.exit("--offload cpu needs a GPU (it saves GPU memory)")
    if args.replicas < 1 or world_size % args.replicas:
        sys.exit(f"--replicas {args.replicas} has to divide {world_size}, the number of ranks")
    flags.check(args, device.type, global_batch, world_size)
    train, test = load_text(args, global_batch)
    sampler = DistributedSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    train_batches = DataLoader(train, batch, sampler=sampler, drop_last=True,
                               pin_memory=device.type != "cpu")

    # Model and optimizer.
    shape = {name: getattr(args, name) for name in ("layers", "width", "heads", "context")}
    with torch.device("meta"):  # meta: shapes without memory
        model = nn.Sequential(*parts(**shape, checkpointing=args.activation_checkpointing))
    model.to(dtype)
    lr = args.lr * (global_batch / 256) ** 0.5  # square-root rule, for Adam: 2205.10287
    shard(model, parts(**shape), args, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    # Resume after the last saved epoch. Every rank reads the checkpoint.
    step = 0
    settings = {**shape, "text": args.text or "Python's documentation",
                "global_batch_size": global_batch, "precision": args.precision, "seed": args.seed}
    if flags.has_checkpoint(args):
        with flags.exit_on_load_error(args):
            step = load(model, optimizer, args.checkpoint, settings)

    # Training: each rank has its own batch; averaged gradients keep all parameters identical.
    epoch_steps = len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    report = Report(args, rank, "sequences", chapter="05_zero/fsdp.py", ranks=world_size,
                    device=device.type, nodes=devices.count_nodes(local_rank), model="GPT",
                    dataset=settings["text"], batch_size=batch, **settings,
                    replicas=args.replicas, offload=args.offload,
                    parameters=sum(parameter.numel() for parameter in model.parameters()))
    report.start_run(len(train), step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        sampler.set_epoch(epoch)  # else every epoch has the same order
        losses = []
        report.start_epoch()
        for tokens, next_tokens in train_batches:
            tokens = tokens.to(device, non_blocking=True).long()
            next_tokens = next_tokens.to(device, non_blocking=True).long()
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            # The groups of a mesh have PyTorch's own time-out. Each call restarts this timer.
            faulthandler.dump_traceback_later(args.timeout, exit=True)
            optimizer.zero_grad()
            logits = model(tokens).to(dtype)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())
            loss.backward()  # each rank gets the averaged gradients of its shards
            optimizer.step()
            step += 1
            losses.append(loss.detach())
            report.end_step(step)
            if step == last_step:  # --max-steps
                break
        mean = torch.stack(losses).double().mean() / math.log(2)  # in bits
        dist.all_reduce(mean, dist.ReduceOp.SUM)  # every rank calls it and gets the sum
        report.end_epoch(epoch, mean.item() / world_size)  # item() waits: once per epoch
        if args.checkpoint and step % epoch_steps == 0:  # every rank saves its shards
            save(model, optimizer, args.checkpoint, settings, step)

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
    run(main)  # calls main(); if one rank fails, all end: ../03_ddp/README.md, "If a rank fails"
