"""Train a small GPT, split over many GPUs by FSDP2. Resume in mid-epoch, on any number of ranks.

    python your_script_fsdp.py                                              # one rank
    mpiexec -n 2 python your_script_fsdp.py --checkpoint saved              # or
    torchrun --nproc-per-node 2 your_script_fsdp.py --checkpoint saved      # or srun, or PALS
"""

import argparse
import signal
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # FSDP
from torch import nn
from torch.distributed.checkpoint import state_dict as states  # FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # FSDP
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from text import load_text
from transformer import parts
from workshop.ranks import find_ranks, refuse  # `from ranks import`, in another folder

SHAPE = {"layers": 3, "width": 96, "heads": 4, "context": 64}
GLOBAL_BATCH = 32  # sequences per step, on all ranks together


def make_model(device, is_bf16, is_compiled):
    with torch.device("meta"):  # FSDP: shapes without memory: no rank ever has the whole model
        model = nn.Sequential(*parts(**SHAPE))
    bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)  # FSDP: not autocast;
    precision = bf16 if is_bf16 else MixedPrecisionPolicy()  # shards and Adam stay in fp32
    for part in model:  # the embedding, the blocks, the head
        if is_compiled:
            part.forward = torch.compile(part.forward)  # FSDP: fully_shard gathers outside it
        fully_shard(part, mp_policy=precision)  # FSDP: gathered only while it computes
    fully_shard(model, mp_policy=precision)  # FSDP: the model itself last
    model.to_empty(device=device)  # FSDP: allocates this rank's shards, without values
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for part, whole in zip(model, parts(**SHAPE)):  # FSDP: creates one whole part at a time
        states.set_model_state_dict(part, whole.state_dict(), options=options)
    return model


def gather(value):  # the values of all ranks, on every rank
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def random_modules(model):  # RESUME: whose generators dropout, noise, ... use, on each rank
    device = next(model.parameters()).device
    return [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]


def get_state(model, optimizer, step):  # FSDP: shards that know their place in the whole
    weights, moments = states.get_state_dict(model, optimizer)
    generators = [module.get_rng_state() for module in random_modules(model)]
    return {"model": weights, "optimizer": moments, "step": step,
            "generators": gather([state.numpy().tobytes() for state in generators])}


def load(model, optimizer, folder):
    if not all(gather((folder / ".metadata").exists())):
        refuse(f"not every rank sees {folder}: all nodes need the same disk")  # rank 0 prints it
    state = get_state(model, optimizer, step=0)
    dcp.load(state, checkpoint_id=folder)  # FSDP: reads this rank's shards, whoever saved them
    states.set_state_dict(model, optimizer, model_state_dict=state["model"],
                          optim_state_dict=state["optimizer"])
    if len(state["generators"]) == dist.get_world_size():  # RESUME: else this job draws others
        for module, generator in zip(random_modules(model), state["generators"][dist.get_rank()]):
            module.set_rng_state(torch.frombuffer(bytearray(generator), dtype=torch.uint8))
    return state["step"]


def main():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--text", help="file to train on (Python's documentation)")
    add("--steps", type=int, default=150, help="train up to this step (150 of 204 in an epoch)")
    add("--micro-batch", type=int, default=8, help="sequences that a GPU holds at once (8)")
    add("--precision", choices=("fp32", "bf16", "fp64"), help="(GPU: bf16, CPU: fp32)")
    add("--compile", action="store_true")
    add("--checkpoint", metavar="FOLDER", help="save into this folder, and resume from it")
    add("--save-steps", type=int, default=60, metavar="N", help="save every N steps (60)")
    args = parser.parse_args()
    rank, world_size, local_rank = find_ranks()
    if GLOBAL_BATCH % world_size:
        refuse(f"the ranks have to divide {GLOBAL_BATCH}, the sequences per step")
    device, backend, precision = torch.device("cpu"), "gloo", args.precision or "fp32"
    gpu = torch.accelerator.current_accelerator(check_available=True)  # cuda, xpu, ... or None
    if gpu and gpu.type != "mps":
        device = torch.device(gpu.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)
        backend = f"cpu:gloo,{gpu.type}:{dist.get_default_backend_for_device(gpu)}"  # cuda: NCCL
        precision = args.precision or "bf16"
    dist.init_process_group(backend)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64 if precision == "fp64" else torch.float32)
    train, _ = load_text(argparse.Namespace(**SHAPE, text=args.text), GLOBAL_BATCH)
    batch, epoch_steps = GLOBAL_BATCH // world_size, len(train) // GLOBAL_BATCH
    sampler = DistributedSampler(train, drop_last=True)
    model = make_model(device, precision == "bf16", args.compile)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)  # FSDP: after fully_shard
    step, sigterms, saving = 0, [], None
    if args.checkpoint:  # RESUME: a scheduler sends SIGTERM before it ends the job
        signal.signal(signal.SIGTERM, lambda *_: sigterms.append(True))
        group = dist.new_group(backend="gloo")  # FSDP: for the thread that saves, while ranks train
        saved = Path(args.checkpoint).glob("step*/.metadata")  # FSDP: it is written last
        steps = gather([int(path.parent.name[4:]) for path in saved])[0]  # FSDP: rank 0 decides
        if steps:
            step = load(model, optimizer, Path(args.checkpoint, f"step{max(steps):06}"))
    while step < args.steps:
        sampler.set_epoch(step // epoch_steps)  # FSDP: a resumed epoch has its order again,
        order = list(sampler)[step % epoch_steps * batch:epoch_steps * batch]  # FSDP: and goes on
        loader = DataLoader(train, batch, sampler=order,
                            generator=torch.Generator())  # RESUME: not that of dropout
        for sequences in islice(loader, args.steps - step):
            loss_sum = torch.zeros((), device=device)
            for first in range(0, batch, args.micro_batch):
                last = first + args.micro_batch
                tokens, targets = (part[first:last].to(device).long() for part in sequences)
                model.set_requires_gradient_sync(last >= batch)  # FSDP: or every backward reduces
                logits = model(tokens).to(loss_sum.dtype)
                loss = cross_entropy(logits.flatten(0, 1), targets.flatten()) * len(tokens) / batch
                loss.backward()
                loss_sum += loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # FSDP: of all shards
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 20 == 0:
                dist.all_reduce(loss_sum.div_(world_size))
                norm = norm.full_tensor()  # FSDP: an ordinary tensor; every rank calls it
                if rank == 0:
                    print(f"step {step}: loss {loss_sum:.4f}, norm {norm:.4f}", flush=True)
            stops = step % 5 == 0 and any(gather(bool(sigterms)))  # RESUME: all ranks alike
            if args.checkpoint and (stops or step % args.save_steps == 0):  # FSDP: on every rank
                if saving:  # FSDP: the previous checkpoint, which may not be complete yet
                    saving.result()
                saving = dcp.async_save(get_state(model, optimizer, step), process_group=group,
                                        checkpoint_id=f"{args.checkpoint}/step{step:06}")
            if saving and (stops or step == args.steps):  # FSDP: the last checkpoint
                saving.result()
            if stops:
                return
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = states.get_model_state_dict(model, options=options)  # FSDP: every rank calls it
    if rank == 0:  # FSDP: only rank 0 gets them
        torch.save(weights, "gpt.pt")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
