"""Train an image classifier on one device. Later chapters are this file with a few lines changed.

    python main.py                      # five epochs of handwritten digits, a few seconds

ranks.py is for your own programs, too; workshop.py has this course's flags, data and report.
"""

import os
import workshop  # first: it refuses a wrong batch at once, and PyTorch takes seconds

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from ranks import refuse_lone_ranks, run


def build_model(name: str, images: torch.Tensor) -> nn.Module:
    if name != "cnn":
        from torchvision.models import get_model
        return get_model(name, num_classes=10)
    channels, side = images.shape[1], (images.shape[-1] - 4) // 2
    return nn.Sequential(  # no BatchNorm, no dropout: any number of ranks trains the same
        nn.Conv2d(channels, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * side * side, 128), nn.ReLU(),
        nn.Linear(128, 10))


def batches(dataset, sampler, size, device, drop_last=False):
    """A batch is one dataset[indices], fast with tensors; other data sets want batch_size=size."""
    return DataLoader(dataset, batch_size=None, sampler=BatchSampler(sampler, size, drop_last),
                      pin_memory=device.type != "cpu")  # a GPU can copy it while the CPU goes on


def main():
    # The device: one process, one GPU or CPU.
    args = workshop.parse_args(__doc__)
    refuse_lone_ranks(1, one_process=True)  # several would each train the same
    device = workshop.choose_device(args)  # a GPU where there is one, else the CPU
    if device.type != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32: fp32 products keep 10 bits of 23
        torch.backends.cudnn.benchmark = True  # try each algorithm of a convolution once
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    torch.manual_seed(args.seed)

    # Batch and data: every epoch is shuffled anew; a remainder that fills no batch stays out.
    args.global_batch_size = args.batch_size = args.global_batch_size or args.batch_size or 64
    workshop.check(args, device.type)
    train, test = workshop.load_tensors(args)
    layout = workshop.memory_format(args, device.type)
    std, mean = torch.std_mean(train.tensors[0][:256].to(dtype))

    def standardised(images):
        return ((images.to(dtype) - mean) / std).to(memory_format=layout)

    sampler = RandomSampler(train, generator=torch.Generator())
    train_batches = batches(train, sampler, args.batch_size, device, drop_last=True)
    test_batches = batches(test, range(len(test)), args.batch_size, device)

    # The model and its optimizer.
    model = build_model(args.model, train.tensors[0]).to(device, dtype, memory_format=layout)
    if args.compile:
        model.compile()
    lr = args.lr * args.global_batch_size / 256  # the linear rule: twice the batch, twice the rate
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)

    # Resume: continue after the epoch that was saved.
    step = 0
    if args.resume:
        with workshop.resuming(args):
            checkpoint = torch.load(args.checkpoint, map_location="cpu")
            workshop.refuse_other(checkpoint["training"], args)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            step = checkpoint["step"]
            del checkpoint  # or it stays in memory

    # Training.
    epoch_steps = len(train) // args.global_batch_size
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    warmup_steps = max(1, args.warmup_epochs * epoch_steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    report = workshop.Report("01_single_node", args, device.type, parameters, len(train))
    report.begin(step, last_step, epoch_steps, lr)
    while step < last_step:
        epoch = step // epoch_steps
        sampler.generator.manual_seed(args.seed + epoch)  # another order each epoch
        losses, hits = [], []
        for images, labels in report.steps(train_batches):
            images, labels = [part.to(device, non_blocking=True) for part in (images, labels)]
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup_steps)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                logits = model(standardised(images))
                loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(loss.detach())
            hits.append(logits.argmax(1) == labels)
        means = torch.stack([torch.stack(losses).double().mean(), torch.cat(hits).double().mean()])
        report.epoch(epoch, *means.tolist())  # tolist() waits for the device: once an epoch
        if args.checkpoint and step % epoch_steps == 0:
            state = {"training": workshop.training_of(args), "step": step,
                     "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)  # never a half-written file

    # Evaluation: every test image once.
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in test_batches:
            right += (model(standardised(images.to(device))).argmax(1) == labels.to(device)).sum()
    report.end(right.item(), len(test))


if __name__ == "__main__":
    run(main)
