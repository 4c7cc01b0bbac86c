"""Train one network with data, tensor and pipeline parallelism; compare with one process.

    mpiexec -n 2 python three_ways.py           # all in turn
    mpiexec -n 4 python three_ways.py tensor    # one of data, tensor, pipeline (1F1B) and gpipe

    cd .. && mpiexec -n 2 python -m cluster.footprint 03_ddp/three_ways.py tensor    # counts bytes

The network has four linear layers with ReLUs between them; the images are scikit-learn's digits.
To compare, each process then trains the same network alone. All runs are in fp64, so their losses
and parameters must agree to rounding.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop.data import load_digits
from workshop.devices import gather
from workshop.ending import run
from workshop.flags import Parser
from workshop.ranks import find_ranks

LAYERS, IMAGES, PIXELS, CLASSES = 4, 1437, 64, 10
LEARNING_RATE, TOLERANCE = 1.5, 1e-12  # the rate per 256 images of batch: the linear rule


def build_network(width):
    torch.manual_seed(0)  # the same weights on every rank
    sizes = [PIXELS, *[width] * (LAYERS - 1), CLASSES]
    modules = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules[:-1]).double()


def load_batches(batch_size):
    """Return all images, as (steps, batch size, 64) numbers from 0 to 1, and their labels."""
    digits, steps = load_digits()[0], IMAGES // batch_size
    images = torch.tensor(digits.images[:steps * batch_size] / 16)
    labels = torch.tensor(digits.labels[:steps * batch_size])
    return images.reshape(steps, batch_size, PIXELS), labels.reshape(steps, batch_size)


def make_step(model):
    """Return a function that computes the gradients and returns the loss."""
    def step(images, labels):
        loss = cross_entropy(model(images), labels)
        loss.backward()
        return loss
    return step


# Each function below returns this rank's part of the network, its images and labels of each step
# (None if the rank needs none), and step(images, labels), which computes the gradients of the part
# and returns the loss, or None on a rank that does not compute it.

def alone(network, args):
    """The whole network, the whole batch: one process."""
    return network, *load_batches(args.batch_size), make_step(network)


def data(network, args):
    """The whole network, a part of the batch."""
    ddp = DistributedDataParallel(network)  # its backward averages the gradients over the ranks
    images, labels = load_batches(args.batch_size)
    part = slice(dist.get_rank(), None, dist.get_world_size())  # every N-th image
    return network, images[:, part].contiguous(), labels[:, part].contiguous(), make_step(ddp)


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
    stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
    schedule = schedule_class(stage, args.micro_batches, cross_entropy)

    def step(images, labels):
        inputs = [] if images is None else [images]
        losses = []
        schedule.step(*inputs, target=labels, losses=losses, return_outputs=False)
        return torch.stack(losses).mean() if losses else None
    images, labels = load_batches(args.batch_size)
    if rank > 0:
        images = [None] * len(images)
    if rank < world_size - 1:
        labels = [None] * len(labels)
    return part, images, labels, step


WAYS = {"data": data, "tensor": tensor, "pipeline": pipeline,
        "gpipe": partial(pipeline, schedule_class=ScheduleGPipe)}


def train(way, args):
    """Train in one way; return this rank's losses, and its parameters, gathered if split."""
    part, images, labels, step = way(build_network(args.width), args)
    optimizer = torch.optim.SGD(part.parameters(), lr=LEARNING_RATE * args.batch_size / 256)
    losses = []
    for batch in zip(images, labels):
        optimizer.zero_grad()
        loss = step(*batch)
        optimizer.step()
        if loss is not None:
            losses.append(loss.item())
    parameters = {name: value.full_tensor() if isinstance(value, DTensor) else value
                  for name, value in part.state_dict().items()}
    return torch.tensor(losses, dtype=torch.float64), parameters


def difference(runs, losses, parameters):
    """Return the largest difference of any loss or parameter from those of one process.

    runs: the results of train() on each rank. A step's loss is the mean of the ranks' losses.
    """
    rank_losses, parts = zip(*runs)
    differences = [torch.stack([values for values in rank_losses if len(values)]).mean(0) - losses]
    for part in parts:
        differences += [(value - parameters[name]).flatten() for name, value in part.items()]
    return torch.cat(differences).abs().max().item()  # NaN, if one is: Python's max() can lose it


def main():
    rank, world_size, _ = find_ranks()
    parser = Parser(__doc__)
    add = parser.add_argument
    add("way", nargs="?", choices=WAYS, help="train in this way only")
    add("--batch-size", type=int, choices=(32, 64, 128, 256), default=64,
        help="images per step on all ranks (64)")
    add("--width", type=int, choices=(64, 256, 1024), default=256,
        help="outputs of each layer except the last (256)")
    add("--micro-batches", type=int, choices=(4, 8, 16), default=4,
        help="micro-batches per batch of a pipeline (4)")
    args = parser.parse_args()
    if world_size not in (1, 2, 4):
        parser.error(f"{world_size} ranks: use 1, 2 or 4, which split the {LAYERS} layers evenly")
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("gloo")
    ways = [args.way] if args.way else WAYS
    results = {way: gather(train(WAYS[way], args)) for way in ways}
    losses, parameters = train(alone, args)  # on all ranks: each detects a difference
    differences = {way: difference(runs, losses, parameters) for way, runs in results.items()}
    if rank == 0:
        count = sum(value.numel() for value in parameters.values())
        print(f"alone, {count:,} parameters: in {len(losses)} steps the loss falls from "
              f"{losses[0]:.3f} to {losses[-1]:.3f}")
        print("largest difference from alone, of any loss or parameter:",
              ", ".join(f"{way} {value:.1e}" for way, value in differences.items()))
    dist.barrier()  # no rank exits while others communicate
    failures = [way for way, value in differences.items() if not value <= TOLERANCE]  # or NaN
    if failures:
        sys.exit(f"training differs from one process: {', '.join(failures)}")


if __name__ == "__main__":
    run(main)
