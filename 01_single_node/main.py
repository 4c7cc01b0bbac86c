"""Train an image classifier on one device. Later chapters are this file with a few lines changed.

    python main.py                      # five epochs of handwritten digits, a few seconds
"""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, default_convert

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
    # Device: one process on one GPU or CPU.
    check_world_size(1, one_process=True)  # several processes would each train the same network
    parser = flags.make_parser(__doc__, lr=0.2)
    parser.add_argument("--model", choices=("cnn", "resnet18", "resnet50"), default="cnn")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--profile", metavar="FILE", help="trace of steps 6 to 8, for perfetto.dev")
    args = parser.parse_args()
    device = torch.device("cpu")
    gpu = torch.accelerator.current_accelerator(check_available=True)  # cuda, xpu, ... or None
    if args.device != "cpu" and gpu and gpu.type != "mps":
        device = gpu
        torch.set_float32_matmul_precision("high")  # TF32: 10 of fp32's 23 mantissa bits
        torch.backends.cudnn.benchmark = not torch.version.hip  # try algorithms; not on AMD
    devices.check_device(args, device)  # exits if --device asks for a GPU that is not there
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    torch.manual_seed(args.seed)

    # Batch and data: reshuffled every epoch; the last incomplete batch is dropped.
    global_batch = batch = args.global_batch_size or args.batch_size
    flags.check(args, device.type, global_batch)
    train, test = data.load_data(args, global_batch)
    mean, std = train.images[:256].mean(), train.images[:256].std()  # 256 are enough
    # Channels last, so a pixel's channels are adjacent: faster convolutions on NVIDIA's GPUs.
    is_nvidia = device.type == "cuda" and not torch.version.hip
    layout = torch.channels_last if is_nvidia else torch.contiguous_format
    sampler = RandomSampler(train, generator=torch.Generator())
    # `train` returns whole batches as arrays, faster than image by image; a GPU gets pinned memory.
    options = {"collate_fn": default_convert, "pin_memory": device.type != "cpu"}
    train_batches = DataLoader(train, batch, sampler=sampler, drop_last=True, **options)
    test_batches = DataLoader(test, batch, sampler=range(len(test)), **options)

    # Model and optimizer.
    model = build_model(args.model, train.images.shape[1:]).to(device, dtype, memory_format=layout)
    if args.compile:
        model.compile()
    lr = args.lr * global_batch / 256  # linear scaling rule: twice the batch, twice the rate
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    # Resume after the last saved epoch.
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

    # Training.
    epoch_steps = len(train) // global_batch
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    report = Report(args, chapter="01_single_node", ranks=1, device=device.type,
                    nodes=1, batch_size=batch, **settings,
                    parameters=sum(parameter.numel() for parameter in model.parameters()))
    report.start_run(len(train), step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        sampler.generator.manual_seed(args.seed + epoch)  # a different order every epoch
        losses, hits = [], []
        report.start_epoch()
        for images, labels in train_batches:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            images = ((images.to(dtype) - mean) / std).to(memory_format=layout)
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                logits = model(images)
                loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(loss.detach())
            hits.append(logits.argmax(1) == labels)
            report.end_step(step)
            if step == last_step:  # --max-steps
                break
        means = torch.stack([torch.stack(losses).double().mean(), torch.cat(hits).double().mean()])
        report.end_epoch(epoch, *means.tolist())  # tolist() waits for the device: once per epoch
        if args.checkpoint and step % epoch_steps == 0:
            state = {"settings": settings, "step": step,
                     "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)  # never a half-written file

    # Evaluation: every test image once.
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in test_batches:
            images = (images.to(device).to(dtype) - mean) / std
            correct += (model(images).argmax(1) == labels.to(device)).sum()
    report.end_run(correct.item(), len(test))


if __name__ == "__main__":
    run(main)
