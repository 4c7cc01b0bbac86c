"""Train one network with data, tensor and pipeline parallelism; count its bytes.

    mpiexec -n 2 python three_ways.py     # 2 or 4 ranks: all three in turn
    mpiexec -n 4 python three_ways.py pipeline gpipe --micro-batches 8    # two schedules

The network has four linear layers with ReLUs between them; the images are scikit-learn's digits.
Tensor parallelism splits the width evenly, and a pipeline splits the four layers: so 2 or 4 ranks.
To compare, each process then trains the same network alone. All runs are in fp64, so their losses
and parameters must agree to rounding. The table shows bytes of the last step:

    parameters      the rank's part of the network; the gradients need as many again
    activations     peak of what autograd saves for backward, without parameters, images, labels
                    and receive buffers
    images, labels  the rank's part of the batch
    sends           tensors passed to torch.distributed. A send puts them on the network once, a
                    ring all-reduce 2 (ranks - 1) / ranks times (Patarasuk and Yuan,
                    doi:10.1016/j.jpdc.2008.09.002)
"""

import json
import statistics
import sys
import weakref
from collections import Counter

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop.devices import gather
from workshop.flags import Parser, refuse_unwritable
from workshop.ranks import find_ranks, run
from workshop.traffic import CommunicationCounter

LAYERS, IMAGES, PIXELS, CLASSES = 4, 1797, 64, 10
LEARNING_RATE, TOLERANCE = 1.5, 1e-12  # the rate per 256 images of batch: the linear rule
EVENTS = []  # of this rank's pipeline stage in a step: ["forward" or "backward", micro-batch], ...


def build_network(width):
    torch.manual_seed(0)  # the same weights on every rank
    sizes = [PIXELS, *[width] * (LAYERS - 1), CLASSES]
    modules = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules[:-1]).double()


def load_images(args):
    """Return all images in batches: (steps, batch size, 64) numbers from 0 to 1."""
    return split_into_batches(load_digits().data / 16, args.batch_size)


def load_labels(args):
    """Return all labels in batches: (steps, batch size)."""
    return split_into_batches(load_digits().target, args.batch_size)


def split_into_batches(values, size):
    steps = len(values) // size
    return torch.tensor(values[:steps * size]).reshape(steps, size, *values.shape[1:])


# Each function below returns this rank's part of the network, its images and labels (None if the
# rank needs none), and step(images, labels). step computes the gradients of the part and returns
# the loss, or None on a rank that does not compute the loss.

def alone(network, args):
    """The whole network, the whole batch: one process."""
    def step(images, labels):
        loss = cross_entropy(network(images), labels)
        loss.backward()
        return loss
    return network, load_images(args), load_labels(args), step


def data(network, args):
    """The whole network, a part of the batch."""
    rank_slice = slice(dist.get_rank(), None, dist.get_world_size())  # every N-th image
    ddp = DistributedDataParallel(network)

    def step(images, labels):
        loss = cross_entropy(ddp(images), labels)
        loss.backward()  # averages the gradients over the ranks
        return loss
    images = load_images(args)[:, rank_slice].contiguous()
    labels = load_labels(args)[:, rank_slice].contiguous()
    return network, images, labels, step


def tensor(network, args):
    """A part of every layer, the whole batch.

    A layer that is split by columns gives each rank some of the layer's outputs. They are all that
    the rank needs as inputs of the next layer, which is split by rows. Only then do the ranks add
    up their partial results (Shoeybi et al., 1909.08053).
    """
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(network, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(),
                                       "4": ColwiseParallel(), "6": RowwiseParallel()})
    return alone(network, args)


def pipeline(network, args, schedule_class=Schedule1F1B):
    """Some of the layers; the images on the first rank only, the labels on the last only."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    modules = 2 * LAYERS // world_size  # per rank; a layer and its ReLU are two modules
    part = network[modules * rank:modules * (rank + 1)]
    stage = Stage(part, rank, world_size, torch.device("cpu"))
    schedule = schedule_class(stage, args.micro_batches, cross_entropy)

    def step(images, labels):
        inputs = [] if images is None else [images]
        losses = []
        schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
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


class ActivationMemory:
    """Current and peak bytes that autograd saves for backward inside the context `hooks`.

    Shared storage counts once; storage of the tensors in `excluded` does not count.
    """

    def __init__(self, excluded):
        self.current, self.peak, self.references = 0, 0, Counter()
        self.excluded = {storage(value).data_ptr() for value in excluded}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.save, lambda saved: saved.value)

    def save(self, value):
        saved = SavedTensor(value)
        address, size = storage(value).data_ptr(), storage(value).nbytes()
        if address not in self.excluded:
            if self.references[address] == 0:
                self.current += size
            self.references[address] += 1
            self.peak = max(self.peak, self.current)
            weakref.finalize(saved, self.release, address, size)  # when backward releases it
        return saved

    def release(self, address, size):
        self.references[address] -= 1
        if self.references[address] == 0:
            self.current -= size


class SavedTensor:
    """A wrapper of a saved tensor, whose release weakref.finalize reports."""

    def __init__(self, value):
        self.value = value


def local_part(value):
    """Return this rank's part of a tensor, which may be distributed."""
    return value.to_local() if isinstance(value, DTensor) else value


def storage(value):
    return local_part(value).untyped_storage()


def train(way, args):
    """Train in one way; return this rank's record, losses, and parameters as {name: tensor}.

    Parameters that tensor parallelism has split are gathered.
    """
    with CommunicationCounter() as setup_traffic:
        part, images, labels, step = way(build_network(args.width), args)
    optimizer = torch.optim.SGD(part.parameters(), lr=LEARNING_RATE * args.batch_size / 256)
    losses, step_calls = [], []
    for index in range(IMAGES // args.batch_size):
        batch = [None if batches is None else batches[index] for batches in (images, labels)]
        memory = ActivationMemory([*part.parameters(), *filter(torch.is_tensor, batch)])
        EVENTS.clear()
        with CommunicationCounter() as step_traffic, memory.hooks:
            loss = step(*batch)
            optimizer.step()
        optimizer.zero_grad()
        losses.append(None if loss is None else loss.item())
        step_calls.append(step_traffic.calls)
    image_bytes, label_bytes = [0 if value is None else value.nbytes for value in batch]
    record = {"way": way.__name__, "rank": dist.get_rank(), "ranks": dist.get_world_size(),
              "width": args.width, "batch_size": args.batch_size,
              "micro_batches": args.micro_batches,
              "parameters": sum(local_part(parameter).nbytes for parameter in part.parameters()),
              "activations": memory.peak, "images": image_bytes, "labels": label_bytes,
              "start": setup_traffic.calls, "sent": step_calls, "events": list(EVENTS)}
    parameters = {}
    for name, value in part.state_dict().items():
        parameters[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return record, losses, parameters


def difference(runs, losses, parameters):
    """Return the largest difference of any loss or parameter from those of one process.

    runs: the results of train() on each rank. A step's loss is the mean of all ranks' losses.
    """
    _, rank_losses, parts = zip(*runs)
    if set().union(*parts) != set(parameters):
        raise RuntimeError("some parameters are on no rank")
    differences = []
    for step_losses, loss in zip(zip(*rank_losses), losses):
        mean = statistics.fmean(value for value in step_losses if value is not None)
        differences.append(mean - loss)
    for part in parts:
        differences += [(value - parameters[name]).abs().max() for name, value in part.items()]
    # Python's max() can ignore NaN; torch's returns it.
    return torch.tensor(differences, dtype=torch.float64).abs().max().item()


def table_row(record):
    sizes = [record[name] for name in ("parameters", "activations", "images", "labels")]
    calls = record["sent"][-1]
    sends = f"{sum(size for _, size in calls):,} in {len(calls)} x {calls[0][0]}" if calls else ""
    columns = "".join(f"{size:12,}" for size in sizes)
    return f"{record['way']:9}{record['rank']:4}{columns}   {sends}"


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("ways", nargs="*", default=[*WAYS][:3], metavar="WAY",
        help=f"{', '.join(WAYS)} (default: the first three)")
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
        sys.exit(f"--batch-size: use at most {IMAGES}, the number of images")
    if min(args.batch_size, args.width) < 4 or args.batch_size % 4 or args.width % 4:
        sys.exit("--batch-size and --width: use multiples of 4, to split them evenly")
    if args.micro_batches < world_size or args.batch_size % args.micro_batches:
        sys.exit(f"--micro-batches: use at least {world_size}, one per stage, and a divisor of "
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
    record, losses, parameters = train(alone, args)  # on all ranks: each detects a difference
    differences = {way: difference(runs, losses, parameters) for way, runs in trained.items()}
    if rank == 0:
        records = [record]
        for way, runs in trained.items():
            records += [run[0] | {"difference": differences[way]} for run in runs]
        count = sum(value.numel() for value in parameters.values())
        print(f"{LAYERS} layers, {count:,} parameters; "
              f"{len(losses)} steps of {args.batch_size} images; pipelines: {args.micro_batches} "
              "micro-batches")
        print(f"alone, the loss falls from {losses[0]:.3f} to {losses[-1]:.3f}; bytes on a rank:\n")
        print("way      rank  parameters activations      images      labels   sends in a step")
        print(*map(table_row, records), sep="\n")
        print("\nlargest difference from alone, of any loss or parameter:",
              ", ".join(f"{way} {value:.1e}" for way, value in differences.items()))
        if args.results:
            with open(args.results, "a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
    dist.barrier()  # no rank exits while others communicate
    failures = [way for way, value in differences.items() if not value <= TOLERANCE]  # or NaN
    if failures:
        sys.exit(f"training differs from one process: {', '.join(failures)}")


if __name__ == "__main__":
    run(main)
