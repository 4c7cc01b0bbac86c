"""Train one network with data, tensor and pipeline parallelism; count bytes held and sent.

    mpiexec -n 2 python three_ways.py     # 2 or 4 ranks: all three in turn
    mpiexec -n 4 python three_ways.py pipeline gpipe --micro-batches 8    # two schedules

The network has four linear layers with ReLUs between them; the images are scikit-learn's digits. At
the end each process trains alone, to compare: in fp64, so that losses and parameters must agree to
rounding. It needs 2 or 4 ranks, because tensor parallelism splits the width evenly, and a pipeline
the four layers. It counts, in the last step:

    parameters      bytes of the rank's part of the network; the gradients need as many again
    activations     peak bytes saved for backward, not counting parameters, images, labels and
                    receive buffers
    images, labels  bytes of the rank's part of the batch
    sends           bytes passed to torch.distributed. A send puts them on the network once, a ring
                    all-reduce 2 (ranks - 1) / ranks times (Patarasuk and Yuan,
                    doi:10.1016/j.jpdc.2008.09.002)

ranks.py and workshop.py are the same as for main.py.
"""

import json
import statistics
import sys
import weakref
from collections import Counter
from importlib.util import find_spec

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ranks import find_ranks, gather, run
from workshop import Parser, refuse_unwritable

LAYERS, IMAGES, PIXELS, CLASSES = 4, 1797, 64, 10
LEARNING_RATE, TOLERANCE = 1.5, 1e-12  # the rate per 256 images of batch: the linear rule
EVENTS = []  # what a pipeline stage did in a step: ["forward" or "backward", micro-batch], ...
SENDS = {  # operations of torch.distributed: their name here, the index of the argument sent
    "allreduce_": ("all-reduce", 0), "all_reduce": ("all-reduce", 0), "send": ("send", 0),
    "broadcast_": ("broadcast", 0), "scatter_": ("scatter", 1), "allgather_": ("all-gather", 1)}
SILENT = ("recv_", "wait_tensor", "_wrap_tensor_autograd")


def build_network(width):
    torch.manual_seed(0)  # the same weights on every rank
    sizes = [PIXELS, *[width] * (LAYERS - 1), CLASSES]
    modules = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules[:-1]).double()


def load_images(args):
    """Return all images in batches: (steps, batch size, 64) numbers from 0 to 1."""
    return load(range(PIXELS), args) / 16


def load_labels(args):
    """Return all labels in batches: (steps, batch size)."""
    return load(PIXELS, args).squeeze(2).long()


def load(columns, args):
    """Return only these columns of the digits' file: a rank that needs no images reads none."""
    folder, = find_spec("sklearn").submodule_search_locations
    steps = IMAGES // args.batch_size
    rows = np.loadtxt(f"{folder}/datasets/data/digits.csv.gz", delimiter=",", usecols=columns,
                      max_rows=steps * args.batch_size)
    return torch.tensor(rows).reshape(steps, args.batch_size, -1)


# A way returns this rank's part of the network; its images and labels, None if it needs none;
# and step(images, labels), which leaves the gradients in the part and returns the loss, or None on
# a rank that does not see it.

def alone(network, args):
    """The whole network, the whole batch: one process."""
    def step(images, labels):
        loss = cross_entropy(network(images), labels)
        loss.backward()
        return loss
    return network, load_images(args), load_labels(args), step


def data(network, args):
    """The whole network, a part of the batch."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())  # every N-th image
    ddp = DistributedDataParallel(network)

    def step(images, labels):
        loss = cross_entropy(ddp(images), labels)
        loss.backward()  # averages the gradients over the ranks
        return loss
    images = load_images(args)[:, mine].contiguous()
    labels = load_labels(args)[:, mine].contiguous()
    return network, images, labels, step


def tensor(network, args):
    """A part of every layer, the whole batch.

    A layer split by columns leaves each rank with some of its outputs; the next one, split by rows,
    takes just these as its inputs. Only then do the ranks add up their partial results (Shoeybi et
    al., 1909.08053).
    """
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(network, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(),
                                       "4": ColwiseParallel(), "6": RowwiseParallel()})
    return alone(network, args)


def pipeline(network, args, schedule=Schedule1F1B):
    """Some of the layers; the images on the first rank only, the labels on the last only."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    modules = 2 * LAYERS // world_size  # a layer and its ReLU are two
    part = network[modules * rank:modules * (rank + 1)]
    stage = Stage(part, rank, world_size, torch.device("cpu"))
    micro_batches = schedule(stage, args.micro_batches, cross_entropy)

    def step(images, labels):
        inputs = [] if images is None else [images]
        losses = []
        micro_batches.step(*inputs, target=labels, losses=losses, return_outputs=False)
        return torch.stack(losses).mean() if losses else None
    images = load_images(args) if rank == 0 else None
    labels = load_labels(args) if rank == world_size - 1 else None
    return part, images, labels, step


def gpipe(network, args):
    return pipeline(network, args, ScheduleGPipe)


WAYS = {"data": data, "tensor": tensor, "pipeline": pipeline, "gpipe": gpipe}


class Stage(PipelineStage):
    """A PipelineStage that records its forwards and backwards in EVENTS."""

    def forward_one_chunk(self, micro_batch, *args, **kwargs):
        EVENTS.append(["forward", micro_batch])
        return super().forward_one_chunk(micro_batch, *args, **kwargs)

    def backward_one_chunk(self, micro_batch, *args, **kwargs):
        EVENTS.append(["backward", micro_batch])
        return super().backward_one_chunk(micro_batch, *args, **kwargs)


class CommunicationCounter(TorchDispatchMode):
    """Context that records each torch.distributed operation in `calls`, as [operation, bytes].

    Raises KeyError for an unknown operation, so that none is missed.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its operations on the local part and its sends follow
        name = operation.__name__.partition(".")[0]
        if operation.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            kind, index = SENDS[name]
            self.calls.append([kind, sum(leaf.nbytes for leaf in tree_leaves(args[index]))])
        return operation(*args, **(kwargs or {}))


class ActivationMemory:
    """Count the bytes that autograd saves for backward, now and at the peak, inside `hooks`.

    Shared storage counts once; storage of the tensors in `exclude` does not count.
    """

    def __init__(self, exclude):
        self.now, self.peak, self.users = 0, 0, Counter()
        self.excluded = {storage(value).data_ptr() for value in exclude}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.save, lambda saved: saved.value)

    def save(self, value):
        saved = SavedTensor(value)
        address, size = storage(value).data_ptr(), storage(value).nbytes()
        if address not in self.excluded:
            if self.users[address] == 0:
                self.now += size
            self.users[address] += 1
            self.peak = max(self.peak, self.now)
            weakref.finalize(saved, self.release, address, size)  # when backward releases it
        return saved

    def release(self, address, size):
        self.users[address] -= 1
        if self.users[address] == 0:
            self.now -= size


class SavedTensor:
    """Stand-in for a saved tensor, whose deletion can be observed."""

    def __init__(self, value):
        self.value = value


def local(value):
    """Return this rank's part of a tensor that may be distributed."""
    return value.to_local() if isinstance(value, DTensor) else value


def storage(value):
    return local(value).untyped_storage()


def train(way, args):
    """Train in one way; return this rank's record, losses, and parameters as {name: value}.

    Split parameters are gathered.
    """
    with CommunicationCounter() as setup_traffic:
        part, images, labels, step = way(build_network(args.width), args)
    optimizer = torch.optim.SGD(part.parameters(), lr=LEARNING_RATE * args.batch_size / 256)
    losses, sent = [], []
    for number in range(IMAGES // args.batch_size):
        batch = [None if part is None else part[number] for part in (images, labels)]
        memory = ActivationMemory([*part.parameters(), *filter(torch.is_tensor, batch)])
        EVENTS.clear()
        with CommunicationCounter() as step_traffic, memory.hooks:
            loss = step(*batch)
            optimizer.step()
        optimizer.zero_grad()
        losses.append(None if loss is None else loss.item())
        sent.append(step_traffic.calls)
    image_bytes, label_bytes = (0 if part is None else part.nbytes for part in batch)
    record = {"way": way.__name__, "rank": dist.get_rank(), "ranks": dist.get_world_size(),
              "width": args.width, "batch_size": args.batch_size,
              "micro_batches": args.micro_batches,
              "parameters": sum(local(parameter).nbytes for parameter in part.parameters()),
              "activations": memory.peak, "images": image_bytes, "labels": label_bytes,
              "start": setup_traffic.calls, "sent": sent, "events": list(EVENTS)}
    values = {}
    for name, value in part.state_dict().items():
        values[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return record, losses, values


def difference(runs, losses, values):
    """Return the largest difference of any loss or parameter from those of one process.

    runs: what train() returned on each rank. If several ranks have a loss, theirs are averaged.
    """
    _, rank_losses, parts = zip(*runs)
    if {name for part in parts for name in part} != {*values}:
        raise RuntimeError("some parameters are on no rank")
    differences = []
    for step_losses, loss in zip(zip(*rank_losses), losses):
        mean = statistics.fmean(value for value in step_losses if value is not None)
        differences.append(mean - loss)
    for part in parts:
        differences += [(value - values[name]).abs().max() for name, value in part.items()]
    # Python's max() ignores NaN.
    return torch.tensor(differences, dtype=torch.float64).abs().max().item()


def row(record):
    """Return a row of the table."""
    sizes = [record[name] for name in ("parameters", "activations", "images", "labels")]
    last = record["sent"][-1]
    sends = f"{sum(size for _, size in last):,} in {len(last)} x {last[0][0]}" if last else ""
    columns = "".join(f"{size:12,}" for size in sizes)
    return f"{record['way']:9}{record['rank']:4}{columns}   {sends}"


def parse_args():
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("ways", nargs="*", default=[*WAYS][:3], metavar="WAY",
        help=f"{', '.join(WAYS)} (the first three)")
    add("--batch-size", type=int, default=64, help="images per step on all ranks (64)")
    add("--width", type=int, default=256, help="outputs of each layer except the last (256)")
    add("--micro-batches", type=int, default=4, help="micro-batches per batch of a pipeline (4)")
    add("--results", metavar="FILE", help="append one JSON line per way and rank")
    return parser.parse_args()


def check(args, world_size):
    """Exit if a flag's value is impossible, or impossible on `world_size` ranks."""
    if not {*args.ways} <= {*WAYS}:
        sys.exit(f"unknown WAY {' '.join(args.ways)}: choose from {', '.join(WAYS)}")
    if args.batch_size > IMAGES:
        sys.exit(f"--batch-size: there are {IMAGES} images")
    if min(args.batch_size, args.width) < 4 or args.batch_size % 4 or args.width % 4:
        sys.exit("--batch-size and --width: use multiples of 4, to split them evenly")
    if args.micro_batches < world_size or args.batch_size % args.micro_batches:
        sys.exit(f"--micro-batches: at least {world_size}, one for each stage, and a divisor of "
                 "--batch-size")
    refuse_unwritable(args.results)
    if world_size not in (2, 4):
        sys.exit(f"needs 2 or 4 ranks, not {world_size}: mpiexec -n 2 python three_ways.py "
                 f"(they split the width and the {LAYERS} layers evenly)")


def main():
    args = parse_args()
    rank, world_size, _ = find_ranks()
    check(args, world_size)
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("gloo")
    trained = {way: gather(train(WAYS[way], args)) for way in args.ways}
    record, losses, values = train(alone, args)  # on every rank: all see a difference
    differences = {way: difference(runs, losses, values) for way, runs in trained.items()}
    if rank == 0:
        records = [record]
        for way, runs in trained.items():
            records += [run[0] | {"difference": differences[way]} for run in runs]
        print(f"{LAYERS} layers, {sum(value.numel() for value in values.values()):,} parameters; "
              f"{len(losses)} steps of {args.batch_size} images; pipelines: {args.micro_batches} "
              "micro-batches")
        print(f"alone, the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}; bytes on a rank:\n")
        print("way      rank  parameters activations      images      labels   sends in a step")
        print(*map(row, records), sep="\n")
        print("\nlargest difference from alone, of any loss or parameter:",
              ", ".join(f"{way} {value:.1e}" for way, value in differences.items()))
        if args.results:
            with open(args.results, "a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
    dist.barrier()  # no rank leaves while others communicate
    wrong = [way for way, value in differences.items() if not value <= TOLERANCE]  # NaN, too
    if wrong:
        sys.exit(f"not the training of one process: {', '.join(wrong)}")


if __name__ == "__main__":
    run(main)
