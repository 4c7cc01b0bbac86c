"""Train a small GPT with FSDP between nodes and tensor parallelism within each node.

    mpiexec -n 4 python two_d.py --tensor 2     # as two nodes of two ranks: 2 x 2
    mpiexec -n 8 --ppn 4 python two_d.py        # the four ranks of a node share each layer
"""

import faulthandler
import math
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.utils.data import DataLoader, DistributedSampler

from sharded import load, load_from_rank_0, save
from text import evaluate, generate, load_text
from transformer import parts
from workshop import devices, flags
from workshop.ending import run
from workshop.ranks import find_ranks
from workshop.report import Report

# How the ranks of a group divide the layers. Between two layers each rank has some of the tokens;
# attention and MLP gather all. A layer split by columns gives a rank some of the outputs, such as
# whole heads; one split by rows takes them as inputs, and the ranks add up what they get.
ALL, TOKENS = Replicate(), Shard(1)
GATHER = parallel.PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=ALL)
COLUMNS, ROWS = parallel.ColwiseParallel(), parallel.RowwiseParallel(output_layouts=TOKENS)
NORM = parallel.SequenceParallel()
EMBEDDING = {"byte": parallel.RowwiseParallel(input_layouts=ALL, output_layouts=TOKENS),
             "position": parallel.RowwiseParallel(input_layouts=ALL, output_layouts=Shard(0))}
BLOCK = {"attention_norm": NORM, "attention": GATHER, "attention.query": COLUMNS,
         "attention.key": COLUMNS, "attention.value": COLUMNS, "attention.output": ROWS,
         "mlp_norm": NORM, "mlp": GATHER, "mlp.0": COLUMNS, "mlp.2": ROWS}
HEAD = {"0": NORM, "1": parallel.ColwiseParallel(input_layouts=TOKENS, output_layouts=ALL)}
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing changes it


def parallelize(model, whole_parts, mesh, args, device):
    """Divide each block among the ranks of a group; shard the part of each over the groups."""
    bf16 = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)  # reduces in fp32
    precision = bf16 if args.precision == "bf16" else fsdp.MixedPrecisionPolicy()
    for part, plan in zip(model, [EMBEDDING, *[BLOCK] * args.layers, HEAD]):
        parallel.parallelize_module(part, mesh["tensor"], plan)
        fsdp.fully_shard(part, mesh=mesh["data"], mp_policy=precision)
    fsdp.fully_shard(model, mesh=mesh["data"], mp_policy=precision)
    model.to_empty(device=device)  # allocates the shards
    for part, whole in zip(model, whole_parts):  # creates one whole part at a time
        load_from_rank_0(part, whole)


def main():
    # Ranks and device: the launcher has started one process of this program per rank.
    rank, world_size, local_rank = find_ranks()  # my number, how many, my number on this node
    parser = flags.make_gpt_parser(__doc__, lr=0.008)
    parser.add_argument("--tensor", type=int, metavar="RANKS", help="ranks that share each layer "
                        "(as many of a node's as divide --heads and --context)")
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

    # Mesh: of 2 x 4 ranks, 0 to 3 are a tensor group, and 4 to 7. A group's ranks share each layer
    # and read the same sequences; FSDP shards rank 0's part of a layer over the ranks 0 and 4.
    nodes = devices.count_nodes(local_rank)
    tensor_ranks = args.tensor or math.gcd(world_size // nodes, args.heads, args.context)
    if tensor_ranks < 1 or math.gcd(world_size, args.heads, args.context) % tensor_ranks:
        sys.exit(f"--tensor {tensor_ranks} has to divide --heads, --context and {world_size} ranks")
    mesh = init_device_mesh(device.type, (world_size // tensor_ranks, tensor_ranks),
                            mesh_dim_names=("data", "tensor"))
    data_ranks, data_rank = mesh["data"].size(), mesh.get_local_rank("data")

    # Batch and data: shuffled every epoch and split among the groups; leftovers are dropped.
    global_batch = args.global_batch_size or data_ranks * args.batch_size
    batch = global_batch // data_ranks  # per group; flags.check() refuses a remainder
    flags.check(args, device.type, global_batch, data_ranks)
    train, test = load_text(args, global_batch)
    sampler = DistributedSampler(train, data_ranks, data_rank, seed=args.seed, drop_last=True)
    train_batches = DataLoader(train, batch, sampler=sampler, drop_last=True,
                               pin_memory=device.type != "cpu")

    # Model and optimizer.
    shape = {name: getattr(args, name) for name in ("layers", "width", "heads", "context")}
    with torch.device("meta"):  # meta: shapes without memory
        model = nn.Sequential(*parts(**shape, checkpointing=args.activation_checkpointing))
    model.to(dtype)
    lr = args.lr * (global_batch / 256) ** 0.5  # square-root rule, for Adam: 2205.10287
    parallelize(model, parts(**shape), mesh, args, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    # Resume after the last saved epoch. Every rank reads the checkpoint.
    step = 0
    settings = {**shape, "text": args.text or "Python's documentation",
                "global_batch_size": global_batch, "precision": args.precision, "seed": args.seed}
    if flags.has_checkpoint(args):
        with flags.exit_on_load_error(args):
            step = load(model, optimizer, args.checkpoint, settings)

    # Training: each group has its own batch; averaged gradients keep all parameters identical.
    epoch_steps = len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    report = Report(args, rank, "sequences", chapter="05_zero/two_d.py", ranks=world_size,
                    device=device.type, nodes=nodes, dataset=settings["text"], model="GPT",
                    batch_size=batch, tensor_ranks=tensor_ranks, **settings,
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
            # The mesh's groups have PyTorch's own time-out. Each call restarts this timer.
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
        dist.all_reduce(mean, dist.ReduceOp.SUM, mesh.get_group("data"))
        report.end_epoch(epoch, mean.item() / data_ranks)  # item() waits: once per epoch
        if args.checkpoint and step % epoch_steps == 0:  # every rank saves its shards
            save(model, optimizer, args.checkpoint, settings, step)

    # Evaluation: each test byte counts once. Ranks that gather blocks need equally many batches.
    model.eval()
    test_loss = evaluate(model, test, global_batch, data_rank, data_ranks, device)
    dist.all_reduce(test_loss, dist.ReduceOp.SUM, mesh.get_group("data"))
    report.print(f"test loss {test_loss:.4f} bits per byte ({len(test)} sequences)")
    report.print(f"it writes: {generate(model, test[0][0].to(device))}")
    report.write_record(test_loss=test_loss.item())
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()  # rank 0 runs the rendezvous server (the store) and has to leave last


if __name__ == "__main__":
    run(main)  # calls main(); if one rank fails, all end: ../03_ddp/README.md, "If a rank fails"
