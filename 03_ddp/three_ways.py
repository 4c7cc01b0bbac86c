"""Train one network data, tensor and pipeline parallel; count what each rank holds and sends.

    mpiexec -n 2 python three_ways.py     # 2 or 4 ranks: all three, one after the other
    mpiexec -n 4 python three_ways.py pipeline gpipe --micro-batches 8    # two schedules

The network has four linear layers with ReLUs between, the images are scikit-learn's digits. At the
end each process trains alone, to compare: in fp64, so that losses and parameters have to agree to
rounding. It takes 2 or 4 ranks, not 3: tensor parallelism shares out the width evenly, a pipeline
the four layers. Counted in the last step:

    parameters      bytes of the rank's part of the network; the gradients take as much again
    activations     the most bytes that autograd keeps for backward at a time, parameters, images
                    and labels apart, and without the buffers in which the library waits for what
                    others send
    images, labels  bytes of the rank's part of the batch
    sends           bytes that it hands to torch.distributed. A send puts them on the network once,
                    a ring all-reduce 2 (ranks - 1) / ranks times (Patarasuk and Yuan,
                    doi:10.1016/j.jpdc.2008.09.002)

ranks.py and workshop.py are those of main.py.
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
EVENTS = []  # what a pipeline's stage did in a step: ["forward" or "backward", micro-batch], ...
SENDS = {  # operations of torch.distributed: their name here, and the argument that is handed over
    "allreduce_": ("all-reduce", 0), "all_reduce": ("all-reduce", 0), "send": ("send", 0),
    "broadcast_": ("broadcast", 0), "scatter_": ("scatter", 1), "allgather_": ("all-gather", 1)}
SILENT = ("recv_", "wait_tensor", "_wrap_tensor_autograd")


def build_network(width):
    torch.manual_seed(0)  # the same on every rank
    sizes = [PIXELS, *[width] * (LAYERS - 1), CLASSES]
    modules = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules[:-1]).double()


def load_images(args):
    """All images in batches: (steps, batch size, 64) numbers from 0 to 1."""
    return load(range(PIXELS), args) / 16


def load_labels(args):
    """All labels in batches: (steps, batch size)."""
    return load(PIXELS, args).squeeze(2).long()


def load(columns, args):
    """These columns of the digits' file and no others: a rank that needs no images reads none."""
    folder, = find_spec("sklearn").submodule_search_locations
    steps = IMAGES // args.batch_size
    rows = np.loadtxt(f"{folder}/datasets/data/digits.csv.gz", delimiter=",", usecols=columns,
                      max_rows=steps * args.batch_size)
    return torch.tensor(rows).reshape(steps, args.batch_size, -1)


# A way returns this rank's part of the network; its images and labels, None where it needs none;
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
    """A PipelineStage that notes what the schedule lets it do."""

    def forward_one_chunk(self, micro_batch, *args, **kwargs):
        EVENTS.append(["forward", micro_batch])
        return super().forward_one_chunk(micro_batch, *args, **kwargs)

    def backward_one_chunk(self, micro_batch, *args, **kwargs):
        EVENTS.append(["backward", micro_batch])
        return super().backward_one_chunk(micro_batch, *args, **kwargs)


class Sent(TorchDispatchMode):
    """While it is entered: calls, [[operation, bytes], ...] of what goes to torch.distributed.

    Raises KeyError at an operation that it does not know, so that none goes uncounted.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # what it does with the rank's own part, and sends, comes next
        name = operation.__name__.partition(".")[0]
        if operation.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            kind, place = SENDS[name]
            self.calls.append([kind, sum(sent.nbytes for sent in tree_leaves(args[place]))])
        return operation(*args, **(kwargs or {}))


class Kept:
    """While `hooks` is entered: the bytes that autograd keeps for backward, now and at most.

    Memory counts once, whoever shares it; that of the tensors `apart` does not.
    """

    def __init__(self, apart):
        self.now, self.most, self.users = 0, 0, Counter()
        self.apart = {storage(value).data_ptr() for value in apart}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept.value)

    def keep(self, value):
        kept = KeptTensor(value)
        address, size = storage(value).data_ptr(), storage(value).nbytes()
        if address not in self.apart:
            if self.users[address] == 0:
                self.now += size
            self.users[address] += 1
            self.most = max(self.most, self.now)
            weakref.finalize(kept, self.release, address, size)  # when backward lets go of it
        return kept

    def release(self, address, size):
        self.users[address] -= 1
        if self.users[address] == 0:
            self.now -= size


class KeptTensor:
    """What autograd keeps in place of a tensor, so that its end is noticed."""

    def __init__(self, value):
        self.value = value


def local(value):
    """This rank's own part of a tensor that may be distributed."""
    return value.to_local() if isinstance(value, DTensor) else value


def storage(value):
    return local(value).untyped_storage()


def train(way, args):
    """Train in a way.

    Returns this rank's record, its losses, and {name: value} of its parameters, split ones whole.
    """
    with Sent() as start:
        part, images, labels, step = way(build_network(args.width), args)
    optimizer = torch.optim.SGD(part.parameters(), lr=LEARNING_RATE * args.batch_size / 256)
    losses, sent = [], []
    for number in range(IMAGES // args.batch_size):
        batch = [None if data is None else data[number] for data in (images, labels)]
        kept = Kept([*part.parameters(), *filter(torch.is_tensor, batch)])
        EVENTS.clear()
        with Sent() as during, kept.hooks:
            loss = step(*batch)
            optimizer.step()
        optimizer.zero_grad()
        losses.append(None if loss is None else loss.item())
        sent.append(during.calls)
    image_bytes, label_bytes = (0 if data is None else data.nbytes for data in batch)
    record = {"way": way.__name__, "rank": dist.get_rank(), "ranks": dist.get_world_size(),
              "width": args.width, "batch_size": args.batch_size,
              "micro_batches": args.micro_batches,
              "parameters": sum(local(parameter).nbytes for parameter in part.parameters()),
              "activations": kept.most, "images": image_bytes, "labels": label_bytes,
              "start": start.calls, "sent": sent, "events": list(EVENTS)}
    values = {}
    for name, value in part.state_dict().items():
        values[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return record, losses, values


def difference(runs, losses, values):
    """The largest difference of any loss or parameter from those of one process.

    runs: what train() returned on each rank. Where several ranks see a loss, theirs are averaged.
    """
    _, seen, parts = zip(*runs)
    if {name for part in parts for name in part} != {*values}:
        raise RuntimeError("some parameters are on no rank")
    differences = []
    for each, loss in zip(zip(*seen), losses):
        differences.append(statistics.fmean(own for own in each if own is not None) - loss)
    for part in parts:
        differences += [(value - values[name]).abs().max() for name, value in part.items()]
    # Python's max() overlooks NaN.
    return torch.tensor(differences, dtype=torch.float64).abs().max().item()


def row(record):
    """A line of the table."""
    sizes = [record[name] for name in ("parameters", "activations", "images", "labels")]
    last = record["sent"][-1]
    sends = f"{sum(size for _, size in last):,} in {len(last)} x {last[0][0]}" if last else ""
    columns = "".join(f"{size:12,}" for size in sizes)
    return f"{record['way']:9}{record['rank']:4}{columns}   {sends}"


def parse_args():
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("ways", nargs="*", default=[*WAYS][:3], metavar="WAY",
        help=f"of {', '.join(WAYS)} (the first three)")
    add("--batch-size", type=int, default=64, help="images a step on all ranks together (64)")
    add("--width", type=int, default=256, help="outputs of each layer but the last (256)")
    add("--micro-batches", type=int, default=4, help="of a pipeline's batch (4)")
    add("--results", metavar="FILE", help="append a JSON line for each way and rank")
    return parser.parse_args()


def check(args, world_size):
    """Exit where the flags cannot be followed, or not on so many ranks."""
    if not {*args.ways} <= {*WAYS}:
        sys.exit(f"{' '.join(args.ways)}: the ways are {', '.join(WAYS)}")
    if args.batch_size > IMAGES:
        sys.exit(f"--batch-size: there are {IMAGES} images")
    if min(args.batch_size, args.width) < 4 or args.batch_size % 4 or args.width % 4:
        sys.exit("--batch-size and --width: take multiples of 4, to be shared")
    if args.micro_batches < world_size or args.batch_size % args.micro_batches:
        sys.exit(f"--micro-batches: at least {world_size}, one for each stage, and a divisor of "
                 "--batch-size")
    refuse_unwritable(args.results)
    if world_size not in (2, 4):
        sys.exit(f"it takes 2 or 4 ranks, not {world_size}: mpiexec -n 2 python three_ways.py "
                 f"(they share out the width and the {LAYERS} layers evenly)")


def main():
    args = parse_args()
    rank, world_size, _ = find_ranks()
    check(args, world_size)
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("gloo")
    trained = {way: gather(train(WAYS[way], args)) for way in args.ways}
    record, losses, values = train(alone, args)  # on every rank: all notice a difference
    differences = {way: difference(runs, losses, values) for way, runs in trained.items()}
    if rank == 0:
        records = [record]
        for way, runs in trained.items():
            records += [own | {"difference": differences[way]} for own, *_ in runs]
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
    dist.barrier()  # nobody leaves while others still talk
    wrong = [way for way, value in differences.items() if not value <= TOLERANCE]  # NaN, too
    if wrong:
        sys.exit(f"not the training of one process: {', '.join(wrong)}")


if __name__ == "__main__":
    run(main)
