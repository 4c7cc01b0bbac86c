"""Train an image classifier on many devices with Horovod.

    mpiexec -n 2 python main.py         # or srun --mpi=pmi2, or horovodrun --gloo; python: one rank
"""

import faulthandler
import os

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, default_convert

from workshop import data, devices, flags
from workshop.ending import run
from workshop.ranks import check_world_size
from workshop.report import Report


def build_model(name: str, image_shape: tuple[int, ...]) -> nn.Module:
    if name != "cnn":
        from torchvision.models import get_model
        return get_model(name, num_classes=10)
    channels, side = image_shape[0], (image_shape[-1] - 4) // 2
    return nn.Sequential(  # no BatchNorm or dropout: the result is the same on any number of ranks
        nn.Conv2d(channels, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * side * side, 128), nn.ReLU(),
        nn.Linear(128, 10))


def main():
    # Ranks and device: the launcher has started one process of this program per rank.
    hvd.init()  # all ranks connect here, over MPI or gloo
    rank, world_size, local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
    check_world_size(world_size)
    parser = flags.make_parser(__doc__, lr=0.2)
    parser.add_argument("--model", choices=("cnn", "resnet18", "resnet50"), default="cnn")
    args = parser.parse_args()
    device = torch.device("cpu")
    supports_gpus = hvd.cuda_built() or hvd.rocm_built()
    gpu = torch.accelerator.current_accelerator(check_available=True)  # cuda, xpu, ... or None
    if args.device != "cpu" and gpu and supports_gpus:
        device = torch.device(gpu.type, local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)  # from here on, "cuda" is this rank's own GPU
        torch.set_float32_matmul_precision("high")  # TF32: chapter 1
        torch.backends.cudnn.benchmark = not torch.version.hip
    device = devices.check_device(args, device)  # the CPU on all ranks, if two would share a GPU
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    torch.manual_seed(args.seed)

    # Batch and data: shuffled every epoch and split among the ranks; leftover images are dropped.
    global_batch = args.global_batch_size or world_size * args.batch_size
    batch = global_batch // world_size  # per rank; flags.check() refuses a remainder
    flags.check(args, device.type, global_batch, world_size)
    if rank > 0:
        hvd.barrier()  # wait until rank 0, which may download, has loaded the data
    train, test = data.load_data(args, global_batch)
    if rank == 0:
        hvd.barrier()
    mean, std = train.images[:256].mean(), train.images[:256].std()  # 256 are enough
    is_nvidia = device.type == "cuda" and not torch.version.hip
    layout = torch.channels_last if is_nvidia else torch.contiguous_format
    sampler = DistributedSampler(train, world_size, rank, seed=args.seed, drop_last=True)
    options = {"collate_fn": default_convert, "pin_memory": device.type != "cpu"}
    train_batches = DataLoader(train, batch, sampler=sampler, drop_last=True, **options)
    test_batches = DataLoader(test, batch, sampler=range(rank, len(test), world_size), **options)

    # Model and optimizer. Horovod needs contiguous parameters, so not channels_last.
    model = build_model(args.model, train.images.shape[1:]).to(device, dtype)
    lr = args.lr * global_batch / 256  # linear scaling rule: twice the batch, twice the rate
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    # Resume after the last saved epoch; then every rank gets rank 0's state.
    step = 0
    settings = {"dataset": args.dataset, "image_size": args.image_size, "model": args.model,
                "global_batch_size": global_batch, "precision": args.precision, "seed": args.seed}
    if flags.has_checkpoint(args):
        with flags.exit_on_load_error(args):
            checkpoint = torch.load(args.checkpoint, map_location="cpu")
            flags.refuse_other_settings(checkpoint["settings"], settings)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            step = checkpoint["step"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # Training: each rank has its own batch; averaged gradients keep all parameters identical.
    epoch_steps = len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    report = Report(args, rank, chapter="02_horovod", ranks=world_size, device=device.type,
                    nodes=hvd.cross_size(), batch_size=batch, **settings,
                    parameters=sum(parameter.numel() for parameter in model.parameters()))
    report.start_run(len(train), step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        sampler.set_epoch(epoch)  # else every epoch has the same order
        losses, hits = [], []
        report.start_epoch()
        for images, labels in train_batches:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            images = ((images.to(dtype) - mean) / std).to(memory_format=layout)
            # Horovod would wait forever for a rank that hangs. Each call restarts the timer.
            faulthandler.dump_traceback_later(args.timeout, exit=True)
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                logits = model(images)
                loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()  # meanwhile Horovod averages the gradients over the ranks
            optimizer.step()  # waits until all gradients are averaged
            step += 1
            losses.append(loss.detach())
            hits.append(logits.argmax(1) == labels)
            report.end_step(step)
            if step == last_step:  # --max-steps
                break
        means = torch.stack([torch.stack(losses).double().mean(), torch.cat(hits).double().mean()])
        means = hvd.allreduce(means)
        report.end_epoch(epoch, *means.tolist())  # tolist() waits for the device: once per epoch
        if args.checkpoint and step % epoch_steps == 0 and rank == 0:  # ranks have the same state
            state = {"settings": settings, "step": step,
                     "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)  # never a half-written file

    # Evaluation: the ranks split the test images; each image counts once.
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)  # rank 0's BatchNorm buffers
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in test_batches:
            images = (images.to(device).to(dtype) - mean) / std
            correct += (model(images).argmax(1) == labels.to(device)).sum()
    correct = hvd.allreduce(correct, op=hvd.Sum)
    report.end_run(correct.item(), len(test))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run(main)  # calls main(); if one rank fails, all end: README.md, "If a rank fails"
