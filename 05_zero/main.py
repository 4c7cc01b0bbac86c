"""Train a perceptron on many devices with ZeRO: --stage 1, 2 and 3 share out what every rank holds at stage 0.

    mpiexec -n 2 python main.py --stage 3           # prints each rank's bytes beside the formula's
    mpiexec -n 4 python main.py --stage 2 --width 4096 --layers 24 --precision bf16
"""

import argparse
import gc
import glob
import json
import math
import os
import re
import resource
import shutil
import socket
import statistics
import sys
import time
import traceback
import warnings
import zipfile
from importlib.util import find_spec

import numpy as np
import torch
import torch.distributed as dist
from accounting import Accounting, formula, report
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
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


def find_ranks():
    """Set torchrun's variables for ranks of mpiexec, srun or nobody; a launcher counts before the batch system."""
    env, five = os.environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    launcher = next((name for name, size in LAUNCHERS.items() if size in env and name != "RANK"), None)
    rank, size, local_rank = (env[launcher], int(env[LAUNCHERS[launcher]]), 0) if launcher else (0, 1, 0)
    believed = "TORCHELASTIC_RUN_ID" in env or launcher in (None, "SLURM_PROCID")  # torchrun's, or deepspeed's
    if believed and set(five) <= env.keys() and int(env["WORLD_SIZE"]) >= size:
        return
    host, port = "127.0.0.1", socket.create_server(("", 0)).getsockname()[1]  # a port that is free on this node
    if launcher == "SLURM_PROCID":
        host = re.sub(r"\[(\d+).*|,.*", r"\1", env["SLURM_STEP_NODELIST"])  # the first of nid[003-004,007]: nid003
        port = env.get("MASTER_PORT", 20000 + (16 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % 10000)
        local_rank = env["SLURM_LOCALID"]
    elif launcher:
        try:
            import mpi4py
            mpi4py.rc(initialize=False, finalize=True)
            from mpi4py import MPI
        except (ImportError, RuntimeError) as problem:
            sys.exit(f"mpi4py, which has to belong to the MPI of this mpiexec, does not load: {problem}")
        if "OMPI" not in launcher or "MPICH" not in MPI.Get_library_version():  # MPICH aborts under Open MPI
            MPI.Init_thread()
        if not MPI.Is_initialized() or MPI.COMM_WORLD.size != size:
            sys.exit(f"the mpiexec that started these {size} ranks is not of mpi4py's MPI: take the one beside python")
        sys.excepthook = lambda *problem: (  # one fails, all end, when the launcher has passed on why
            traceback.print_exception(*problem, file=sys.__stderr__), time.sleep(1), MPI.COMM_WORLD.Abort(1))
        node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        host, port = MPI.COMM_WORLD.bcast((socket.gethostname() if node.size < size else host, port))
        local_rank = node.rank
    for name in ["WORLD_SIZE"] if launcher else ["WORLD_SIZE", "SLURM_NTASKS"]:
        if int(env.get(name, size)) != size:
            sys.exit(f"{name}={env[name]}, but {size} started: start with srun, srun -n 1 or mpiexec, or unset {name}")
    env.update(zip(five, map(str, (rank, size, local_rank, host, port))))


def parse_args():
    def whole(text):
        if not text.isdecimal() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error, add = sys.exit, parser.add_argument
    add("--dataset", choices=("digits", "mnist", "svhn", "synthetic"), default="digits")
    add("--data-dir", default="data", help="where MNIST and SVHN are, or are downloaded to (data)")
    add("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="of ZeRO (2)")
    add("--width", type=whole, default=1024, help="outputs of each layer of the perceptron (1024)")
    add("--layers", type=whole, default=10, help="layers between the first and the last (10)")
    add("--offload", choices=("none", "cpu"), default="none", help="where the optimizer's part is (none)")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--batch-size", type=whole, help="images a step on each rank (64)")
    batch.add_argument("--global-batch-size", type=whole, help="images a step on all ranks together")
    add("--epochs", type=whole, default=5)
    add("--max-steps", type=whole, default=math.inf, help="stop after this many steps")
    add("--lr", type=float, default=0.002, help="learning rate per 256 images of global batch (0.002)")
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


def read_config(args):
    """ds_config.json as a dict, with the precision that --precision asks for; sets in args the one that holds."""
    try:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ds_config.json")) as file:
            config = json.load(file)
        if {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
            raise ValueError("take the batch out of it, --batch-size and --global-batch-size set it")
        zero = config.setdefault("zero_optimization", {})
        if {"stage", "offload_optimizer", "offload_param"} & zero.keys():
            raise ValueError("take stage and offload out of zero_optimization, --stage and --offload set them")
        zero["stage"] = args.stage
        zero.setdefault("reduce_bucket_size", args.width * (args.width + 1))  # a layer's gradients, not 500 million
        if args.offload == "cpu":
            zero["offload_optimizer"] = {"device": "cpu"}
        accumulation = config.setdefault("gradient_accumulation_steps", 1)
        if type(accumulation) is not int or accumulation < 1:
            raise ValueError(f"gradient_accumulation_steps: {accumulation!r} is not a whole number above 0")
        float(config.get("gradient_clipping", 0))
        if args.precision == "bf16":
            config["bf16"] = config.get("bf16", {}) | {"enabled": True}
        half = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")]
        if len(half) > 1:
            raise ValueError("bf16 and fp16 contradict each other: take one of them out")
    except (OSError, ValueError, TypeError, AttributeError) as problem:  # also: not an object, not a number
        sys.exit(f"ds_config.json beside main.py: {problem}")
    args.precision = half[0] if half and args.precision == "fp32" else args.precision
    return config


def prepare(args):
    """Device, training set and test set, or a line that tells the user what to mend; sets both batch sizes in args."""
    gpu = torch.cuda.is_available() and args.device != "cpu"
    config = args.config = read_config(args)
    ranks, accumulation = dist.get_world_size(), config["gradient_accumulation_steps"]
    args.global_batch_size = args.global_batch_size or ranks * accumulation * (args.batch_size or 64)
    args.batch_size, rest = divmod(args.global_batch_size, ranks * accumulation)
    config["train_micro_batch_size_per_gpu"] = args.batch_size
    for path in filter(None, (args.checkpoint, args.results)):
        if dist.get_rank() == 0 and not opens(path) and not (path == args.checkpoint and os.path.isdir(path)):
            sys.exit(f"cannot write {path}: name a file in a folder that exists and that you may write to")
    for wrong, message in (
            (args.device == "cuda" and not gpu, "--device cuda: PyTorch sees no GPU here; take --device cpu"),
            (args.precision == "bf16" and gpu and not torch.cuda.is_bf16_supported(False), "no bf16 on this GPU: fp32"),
            (args.offload == "cpu" and not gpu, "--offload cpu: here is no GPU whose memory it could save"),
            (args.offload == "cpu" and args.stage == 0, "--offload cpu: only with --stage 1, 2 or 3"),
            (args.precision == "fp64", "--precision fp64: DeepSpeed has none; take fp32"),
            (args.precision == "fp16" and not gpu, "ds_config.json: fp16 needs a GPU: take it out"),
            (rest, f"--global-batch-size: not a multiple of the {ranks} ranks x {accumulation} accumulation steps"),
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
                 f"at most --batch-size {len(data[0]) // (ranks * accumulation)} fits, or take --dataset synthetic")
    if gpu and sum(tensor.nbytes for tensor in data) < torch.cuda.mem_get_info()[0] / 4:
        data = [tensor.to(device) for tensor in data]
    return device, TensorDataset(*data[:2]), TensorDataset(*data[2:])


def build_model(width, layers, images):
    """A perceptron whose layers between the first and the last are equal."""
    widths = [images[0].numel(), *[width] * (layers + 1)]
    model = [nn.Flatten()]
    for inputs, outputs in zip(widths, widths[1:]):
        model += [nn.Linear(inputs, outputs), nn.ReLU()]
        nn.init.kaiming_normal_(model[-2].weight, nonlinearity="relu")
    return nn.Sequential(*model, nn.Linear(width, 10))


def held(model, optimizer, adam):
    """The tensors of this rank by role; they are where DeepSpeed 0.19 has them."""
    whole = list(model.parameters())
    shards = [parameter.ds_tensor for parameter in whole if hasattr(parameter, "ds_tensor")]  # at stage 3
    master = [parameter for group in adam.param_groups for parameter in group["params"]]
    master += getattr(optimizer, "fp32_partitioned_groups_flat", [])
    gradients = [parameter.grad for parameter in whole + master]
    gradients.append(getattr(optimizer, "grad_partitions_flat_buffer", None))
    for averaged in getattr(optimizer, "averaged_gradients", {}).values():
        gradients += averaged or []
    buckets = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    return {"parameters": whole + shards, "gradients": gradients, "master copy": master,
            "optimizer state": [tensor for state in adam.state.values() for tensor in state.values()],
            "buckets": [tensor for bucket in buckets for tensor in (bucket if isinstance(bucket, list) else [bucket])]}


def main():
    started = time.perf_counter()
    sys.stdout.reconfigure(line_buffering=True)  # a line appears when it is printed, through a pipe too
    find_ranks()
    if torch.cuda.is_available():  # a rank that sees a single GPU takes that one
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    elif "OMP_NUM_THREADS" not in os.environ and os.environ["WORLD_SIZE"] != "1":
        torch.set_num_threads(1)  # ranks share the cores of their node
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except (dist.DistNetworkError, dist.DistStoreError):
        sys.exit("no meeting at {MASTER_ADDR}:{MASTER_PORT}: start all, on a free MASTER_PORT".format_map(os.environ))
    rank, ranks, seen = dist.get_rank(), dist.get_world_size(), [None] * dist.get_world_size()
    sys.argv = [word for word in sys.argv if not word.startswith("--local_rank=")]  # deepspeed's launcher adds it
    args = parse_args()
    sys.stdout = sys.stdout if rank == 0 else open(os.devnull, "w")  # rank 0 speaks for all
    torch.manual_seed(args.seed)
    for turn in (True, False):  # rank 0, which may have to download, then the others: the mistake of one ends all
        mistake = None
        try:
            if (rank == 0) == turn:
                device, train, test = prepare(args)
        except SystemExit as end:
            mistake = end.code
        dist.all_gather_object(seen, mistake)
        if any(seen):
            sys.exit(next(filter(None, seen)))
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else rank
    dist.all_gather_object(seen, (own, os.environ["LOCAL_RANK"] == "0"))  # {device: is it the first of its node}
    nodes = sum(dict(seen).values())
    if len(dict(seen)) < ranks:
        sys.exit("several ranks have the same GPU: start at most one a GPU, or take --device cpu")
    os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu"
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo communicates; else it compiles for a minute
    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # ZeRO calls PyTorch by older names
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision, dtype)
    std, mean = torch.std_mean(train.tensors[0][:256].to(dtype))

    def batches(dataset, indices):
        """A batch is one slice of bytes, which become standardised numbers on the device."""
        sampler = torch.tensor(indices, dtype=torch.int64).split(args.batch_size)  # an item is a whole batch
        for images, labels in DataLoader(dataset, batch_size=None, sampler=sampler):
            yield ((images.to(device).to(dtype) - mean) / std).to(compute), labels.to(device)

    model = build_model(args.width, args.layers, train.tensors[0]).to(device, dtype)
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model]
    parameters = sum(sizes)
    step, lr = 0, args.lr * args.global_batch_size / 256
    adam = torch.optim.Adam(model.parameters(), lr=lr)
    try:  # everyone gets rank 0's parameters
        engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=adam, config=args.config)
    except (AssertionError, ValueError, deepspeed.DeepSpeedConfigError) as problem:
        sys.exit(f"DeepSpeed does not take ds_config.json: {' '.join(str(problem).split()):.150}")
    for buffer in filter(torch.is_floating_point, model.buffers()):
        buffer.data = buffer.to(compute)  # BatchNorm's statistics go with the parameters
    training = {name: vars(args)[name] for name in (
        "dataset", "image_size", "width", "layers", "global_batch_size", "seed")}
    tag = "b"  # the place of the last checkpoint
    if args.resume:
        try:
            with open(os.path.join(args.checkpoint, "latest")) as file:
                tag = file.read()
            for path in glob.glob(os.path.join(args.checkpoint, tag, "*.pt")):
                if not zipfile.is_zipfile(path):  # all look at all: one alone would let the others wait
                    raise ValueError(f"{path} is not whole")
            _, checkpoint = engine.load_checkpoint(args.checkpoint)
            if checkpoint["training"] != training:
                raise ValueError(f"its training had {checkpoint['training']}")
            step = engine.global_steps
        except deepspeed.runtime.zero.utils.ZeRORuntimeException:
            sys.exit(f"{args.checkpoint} holds shares of another number of ranks than these {ranks}: start as many as "
                     "before, or convert it into a universal checkpoint (README.md, What goes wrong)")
        except Exception as problem:
            sys.exit(f"cannot go on from {args.checkpoint}, no whole checkpoint of this training: "
                     f"{' '.join(str(problem).split()):.150}")
    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)
    epoch_steps = len(train) // args.global_batch_size
    last_step = min(args.epochs * epoch_steps, args.max_steps)
    print(f"{args.dataset}: {len(train):,} images, stage {args.stage}: {parameters:,} parameters, {args.precision}, "
          f"{device}")
    accumulation = engine.gradient_accumulation_steps()
    print(f"ranks: {ranks}, nodes: {nodes}, batch: {args.batch_size} a rank, {args.global_batch_size} global, "
          f"learning rate: {lr:g}, steps: {step} of {last_step} done, {epoch_steps} an epoch")
    now = time.perf_counter if device.type == "cpu" else lambda: (  # a GPU notes the time in passing: nobody waits
        torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True)))
    account = Accounting(model, lambda: held(model, optimizer, adam), [*train.tensors, *test.tensors], device)
    watched, step_seconds = step + 1, []  # the second step from here: adam has its state
    while step < last_step:
        epoch, first = divmod(step, epoch_steps)
        sampler.set_epoch(epoch)  # another order each epoch
        steps = range(first, min(epoch_steps, last_step - epoch * epoch_steps))
        own = args.global_batch_size // ranks  # images a step on this rank
        indices = list(sampler)[steps.start * own:steps.stop * own]
        losses, hits, times, epoch_started = [], [], [now()], time.perf_counter()
        for images, labels in tqdm(batches(train, indices), total=len(steps) * accumulation, leave=False,
                                   disable=rank > 0 or None):
            optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / max(1, args.warmup_epochs * epoch_steps))
            if step == watched and not account.hooks:
                account.watch()
            logits = engine(images)
            batch_loss = nn.functional.cross_entropy(logits, labels)
            engine.backward(batch_loss)  # the last of the accumulated ones averages the gradients over the ranks
            if step == watched and engine.is_gradient_accumulation_boundary():
                account.close()
            engine.step()  # changes the parameters after that one, and zeroes the gradients
            losses.append(batch_loss.detach())
            hits.append(logits.argmax(1) == labels)
            if engine.global_steps > step:
                step += 1
                times.append(now())
        means = torch.stack([torch.stack(losses).double().mean(), torch.cat(hits).double().mean()])
        dist.all_reduce(means)
        loss, accuracy = (means / ranks).tolist()  # the only look at them in an epoch: until here the device runs free
        speed = len(steps) * args.global_batch_size / (time.perf_counter() - epoch_started)
        if not math.isfinite(loss):
            sys.exit(f"the loss became {loss} in epoch {epoch + 1}: lower --lr, or give it --warmup-epochs")
        print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}, {speed:,.0f} images/s")
        step_seconds += [b - a if device.type == "cpu" else a.elapsed_time(b) / 1000 for a, b in zip(times, times[1:])]
        if args.checkpoint:  # every rank saves; two places in turn, so that a killed run leaves a whole one
            tag = "b" if tag == "a" else "a"
            if rank == 0:  # shares of another number of ranks do not stay
                shutil.rmtree(os.path.join(args.checkpoint, tag), ignore_errors=True)
            engine.save_checkpoint(args.checkpoint, tag, {"training": training}, save_latest=False)
            if rank == 0:
                with open(os.path.join(args.checkpoint, "latest.tmp"), "w") as file:
                    file.write(tag)
                os.replace(file.name, os.path.join(args.checkpoint, "latest"))

    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # BatchNorm's statistics differ by rank
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for images, labels in batches(test, list(range(rank, len(test), ranks))):
            right += (model(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    expected = formula(args.stage, ranks, parameters, max(sizes), width=compute.itemsize, gathered=compute.itemsize,
                       master=4 * (args.offload == "none" and (args.stage > 0 or args.precision != "fp32")),
                       moments=8 * (args.offload == "none"))
    memory = report(account, expected) if account.bytes else []
    print(f"test accuracy {right / len(test):.4f} ({right} of {len(test)} images)")
    if args.results and step_seconds and rank == 0:
        step_time = statistics.median(step_seconds[5:] or step_seconds)  # the first 5 warm up
        record = {"chapter": "05_zero", "ranks": ranks, "nodes": nodes, "device": device.type, **training,
                  "model": "perceptron", "stage": args.stage, "offload": args.offload, "memory": memory,
                  "memory_formula": expected,
                  "precision": args.precision, "batch_size": args.batch_size, "parameters": parameters,
                  "steps": len(step_seconds), "step_seconds": step_time,
                  "images_per_second": args.global_batch_size / step_time,
                  "gradient_bytes": parameters * compute.itemsize,
                  "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
                  "loss": loss, "accuracy": accuracy, "test_accuracy": right.item() / len(test),
                  "total_seconds": time.perf_counter() - started}
        with open(args.results, "a") as file:
            file.write(json.dumps(record) + "\n")
    dist.barrier()  # nobody leaves while others still talk


if __name__ == "__main__":
    code = 0
    try:
        main()
    except SystemExit as end:  # with a line for the user who made a mistake, or without
        if dist.get_rank() if dist.is_initialized() else launched_rank():
            time.sleep(2)  # rank 0 speaks for all, before the launcher ends them
        elif end.code:
            print(f"main.py: {end}", file=sys.stderr)
        code = 2 if end.code else 0
    if dist.is_initialized():  # when DDP is gone, and before Python ends: gloo's threads abort if they outlive it
        gc.collect()
        dist.destroy_process_group()
    sys.exit(code)
