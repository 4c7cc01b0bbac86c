"""Train an image classifier on one device. Every later chapter is this file with a few lines changed.

    python main.py                                  # five epochs of handwritten digits, a few seconds
    python main.py --dataset svhn --model resnet50 --batch-size 512 --max-steps 40 --results runs.jsonl
"""

import argparse
import json
import math
import os
import resource
import socket
import statistics
import sys
import time
from importlib.util import find_spec

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from tqdm import tqdm

LAUNCHERS = {  # the variables in which launchers tell a process its rank, and how many ranks there are
    "HOROVOD_RANK": "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE", "PMI_RANK": "PMI_SIZE", "RANK": "WORLD_SIZE",
    "SLURM_PROCID": "SLURM_STEP_NUM_TASKS"}


def launched_rank():
    """The rank that a launcher gave; RANK alone, without the mark of torchrun or deepspeed, is left from elsewhere."""
    marked = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"} & os.environ.keys()
    return next((int(os.environ[name]) for name in LAUNCHERS if name in os.environ and (name != "RANK" or marked)), 0)


def opens(path):
    """Whether a file of this name opens for writing, which its folder's rights do not tell; nothing is left behind."""
    mode = "a" if os.path.lexists(path) else "x"
    try:
        open(path, mode).close()
    except FileExistsError:  # meanwhile: another run tries, too
        return True
    except OSError:
        return False
    if mode == "x":
        os.remove(path)
    return True


def parse_args():
    def whole(text):
        if not text.isdecimal() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error, add = sys.exit, parser.add_argument
    add("--dataset", choices=("digits", "mnist", "svhn", "synthetic"), default="digits")
    add("--data-dir", default="data", help="where MNIST and SVHN are, or are downloaded to (data)")
    add("--model", choices=("cnn", "resnet18", "resnet50"), default="cnn")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--batch-size", type=whole, help="images a step on each rank (64)")
    batch.add_argument("--global-batch-size", type=whole, help="images a step on all ranks together")
    add("--epochs", type=whole, default=5)
    add("--max-steps", type=whole, default=math.inf, help="stop after this many steps")
    add("--lr", type=float, default=0.2, help="learning rate per 256 images of global batch (0.2)")
    add("--warmup-epochs", type=float, default=0, help="raise the learning rate linearly over these (0)")
    add("--seed", type=int, default=0)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    add("--image-size", type=whole, default=32, help="pixels a side, for synthetic images (32)")
    add("--checkpoint", metavar="FILE", help="saved after each epoch")
    add("--resume", action="store_true", help="go on from --checkpoint")
    add("--results", metavar="FILE", help="append one JSON line with what was measured")
    return parser.parse_args()


def load_data(args, device):
    """Training images and labels, test images and labels; images are bytes (n, channels, side, side)."""
    if args.dataset == "synthetic":  # one image, repeated without taking memory, however large the batch
        n, side = 50 * args.global_batch_size, args.image_size
        images = torch.randint(256, (1, 3, side, side), dtype=torch.uint8, device=device).expand(n, -1, -1, -1)
        return images, torch.arange(n) % 10, images[:100], torch.arange(100) % 10
    if args.dataset == "digits":
        folder, = find_spec("sklearn").submodule_search_locations  # its file alone: importing it takes a second
        digits = torch.tensor(np.loadtxt(f"{folder}/datasets/data/digits.csv.gz", np.uint8, delimiter=","))
        images, labels = digits[:, :-1].reshape(-1, 1, 8, 8), digits[:, -1].long()
        test = torch.arange(len(images)) % 5 == 0
        return images[~test], labels[~test], images[test], labels[test]
    from torchvision.datasets import MNIST, SVHN
    socket.setdefaulttimeout(30)  # a node without a network may answer with silence
    try:
        if args.dataset == "mnist":
            train, test = MNIST(args.data_dir, train=True, download=True), MNIST(args.data_dir, train=False)
            return train.data.unsqueeze(1), train.targets, test.data.unsqueeze(1), test.targets
        train, test = (SVHN(args.data_dir, split, download=True) for split in ("train", "test"))
        return [torch.tensor(array) for array in (train.data, train.labels, test.data, test.labels)]
    except Exception as problem:
        reason = " ".join(str(problem).split())[:80]
        sys.exit(f"no whole {args.dataset} in --data-dir {args.data_dir}, and no download ({reason}): run this once "
                 "where there is a network, or take --dataset digits, which needs none")


def prepare(args):
    """Device, training set and test set, or a line that tells the user what to mend; sets both batch sizes in args."""
    gpu = torch.cuda.is_available() and args.device != "cpu"
    args.batch_size = args.global_batch_size = args.global_batch_size or args.batch_size or 64
    for path in filter(None, (args.checkpoint, args.results)):
        if not opens(path):
            sys.exit(f"cannot write {path}: name a file in a folder that exists and that you may write to")
    for wrong, message in (
            (args.device == "cuda" and not gpu, "--device cuda: PyTorch sees no GPU here; take --device cpu"),
            (args.precision == "bf16" and gpu and not torch.cuda.is_bf16_supported(False), "no bf16 on this GPU: fp32"),
            (args.image_size < 6, "--image-size: the networks need 6 pixels a side or more"),
            (not args.lr > 0 or not args.warmup_epochs >= 0, "--lr has to be above 0, and --warmup-epochs not below"),
            (args.resume and not args.checkpoint, "--resume: name the file to go on from, with --checkpoint"),
            (args.checkpoint and args.resume != os.path.exists(args.checkpoint), f"{args.checkpoint} "
             + ("does not exist: leave out --resume" if args.resume else "exists: go on with --resume, or remove it"))):
        if wrong:
            sys.exit(message)
    device = torch.device("cuda" if gpu else "cpu")
    data = load_data(args, device)
    if args.global_batch_size > len(data[0]):
        sys.exit(f"{args.dataset} has {len(data[0])} training images, not the {args.global_batch_size} of a step: "
                 f"at most --batch-size {len(data[0])} fits, or take --dataset synthetic")
    if gpu and sum(tensor.nbytes for tensor in data) < torch.cuda.mem_get_info()[0] / 4:
        data = [tensor.to(device) for tensor in data]
    if args.model != "cnn":  # torchvision's ResNets want three channels
        data = [tensor.expand(-1, 3, -1, -1) if tensor.dim() == 4 else tensor for tensor in data]
    return device, TensorDataset(*data[:2]), TensorDataset(*data[2:])


def build_model(name, images):
    if name == "cnn":  # no BatchNorm, no dropout: the gradient of a batch is the mean of its parts' gradients
        channels, side = images.shape[1], (images.shape[-1] - 4) // 2
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * side * side, 128), nn.ReLU(), nn.Linear(128, 10))
    from torchvision.models import get_model
    return get_model(name, num_classes=10)


def main():
    started = time.perf_counter()
    sys.stdout.reconfigure(line_buffering=True)  # a line appears when it is printed, through a pipe too
    for size in LAUNCHERS.values():
        if int(os.environ.get(size, 1)) > 1:
            sys.exit(f"{os.environ[size]} ranks would each train the same: start `python main.py` "
                     f"without a launcher and without {size}, or see 03_ddp")
    args = parse_args()
    ranks = nodes = 1
    torch.manual_seed(args.seed)
    device, train, test = prepare(args)
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    std, mean = torch.std_mean(train.tensors[0][:256].to(dtype))

    def batches(dataset, indices):
        """A batch is one slice of bytes, which become standardised numbers on the device."""
        sampler = torch.tensor(indices, dtype=torch.int64).split(args.batch_size)  # an item is a whole batch
        for images, labels in DataLoader(dataset, batch_size=None, sampler=sampler):
            yield (images.to(device).to(dtype) - mean) / std, labels.to(device)

    model = build_model(args.model, train.tensors[0]).to(device, dtype)
    step, lr = 0, args.lr * args.global_batch_size / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    training = {name: vars(args)[name] for name in ("dataset", "image_size", "model", "global_batch_size", "seed")}
    if args.resume:
        try:
            checkpoint = torch.load(args.checkpoint, map_location=device)
            if checkpoint["training"] != training:
                raise ValueError(f"its training had {checkpoint['training']}")
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            step = checkpoint["step"]
        except Exception as problem:
            sys.exit(f"cannot go on from {args.checkpoint}, no whole checkpoint of this training: "
                     f"{' '.join(str(problem).split()):.150}")
    shuffle = torch.Generator()
    sampler = RandomSampler(train, generator=shuffle)
    epoch_steps = len(train) // args.global_batch_size
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.dataset}: {len(train):,} images, {args.model}: {parameters:,} parameters, {args.precision}, {device}")
    print(f"ranks: {ranks}, nodes: {nodes}, batch: {args.batch_size} a rank, {args.global_batch_size} global, "
          f"learning rate: {lr:g}, steps: {step} of {last_step} done, {epoch_steps} an epoch")
    now = time.perf_counter if device.type == "cpu" else lambda: (  # a GPU notes the time in passing: nobody waits
        torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True)))
    step_seconds = []
    while step < last_step:
        epoch, first = divmod(step, epoch_steps)
        shuffle.manual_seed(args.seed + epoch)  # another order each epoch
        steps = range(first, min(epoch_steps, last_step - epoch * epoch_steps))
        indices = list(sampler)[steps.start * args.batch_size:steps.stop * args.batch_size]
        losses, hits, times, epoch_started = [], [], [now()], time.perf_counter()
        for images, labels in tqdm(batches(train, indices), total=len(steps), leave=False, disable=None):
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / max(1, args.warmup_epochs * epoch_steps))
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                logits = model(images)
                batch_loss = nn.functional.cross_entropy(logits, labels)
            batch_loss.backward()
            optimizer.step()
            losses.append(batch_loss.detach())
            hits.append(logits.argmax(1) == labels)
            step += 1
            times.append(now())
        means = torch.stack([torch.stack(losses).double().mean(), torch.cat(hits).double().mean()])
        loss, accuracy = means.tolist()  # the only look at them in an epoch: until here the device runs free
        speed = len(steps) * args.global_batch_size / (time.perf_counter() - epoch_started)
        if not math.isfinite(loss):
            sys.exit(f"the loss became {loss} in epoch {epoch + 1}: lower --lr, or give it --warmup-epochs")
        print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}, {speed:,.0f} images/s")
        step_seconds += [b - a if device.type == "cpu" else a.elapsed_time(b) / 1000 for a, b in zip(times, times[1:])]
        if args.checkpoint:
            torch.save({"training": training, "step": step, "model": model.state_dict(),
                        "optimizer": optimizer.state_dict()}, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)  # a killed run leaves no half file

    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in batches(test, list(range(len(test)))):
            right += (model(images).argmax(1) == labels).sum()
    print(f"test accuracy {right / len(test):.4f} ({right} of {len(test)} images)")
    if args.results and step_seconds:
        step_time = statistics.median(step_seconds[5:] or step_seconds)  # the first 5 warm up
        record = {"chapter": "01_single_node", "ranks": ranks, "nodes": nodes, "device": device.type, **training,
                  "precision": args.precision, "batch_size": args.batch_size, "parameters": parameters,
                  "steps": len(step_seconds), "step_seconds": step_time,
                  "images_per_second": args.global_batch_size / step_time,
                  "gradient_bytes": sum(parameter.nbytes for parameter in model.parameters()),
                  "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
                  "loss": loss, "accuracy": accuracy, "test_accuracy": right.item() / len(test),
                  "total_seconds": time.perf_counter() - started}
        with open(args.results, "a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:  # with a line for the user who made a mistake, or without
        if launched_rank():
            time.sleep(2)  # rank 0 speaks for all, before the launcher ends them
        elif end.code:
            print(f"main.py: {end}", file=sys.stderr)
        sys.exit(2 if end.code else 0)
