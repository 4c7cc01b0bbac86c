"""What the runs of lab.py should take, from the link's nominal rate and the times of ranks that are alone.

    predicted = Predictions(records)           # those of ranks alone; no other is looked at
    predicted.seconds(record, "model")         # a step of this run, by 03_ddp/cost_model.py as it stands
    predicted.seconds(record, "network")       # the same, with what is known of this network and this machine

Written and committed before any run over the link was looked at; SLOW_LINK.md names the commit. What is assumed:

- A step without communication takes as long as that of as many ranks as there are nodes, each alone, all at the same
  time: on a cluster nodes do not slow each other down, here they share memory, caches and, where there are more of them
  than cores, the cores. (The base of the "lone" rank, with the machine to itself, would lay that to the link.)
- A link passes `usable` = 90 % of its nominal rate, the cost model's own constant. A link without a limit passes
  everything at once: it has no nominal rate.
- Chapter 2 overlaps with one buffer of 64 MB, chapter 3 with buckets of 1 and 25 MB: cost_model.BUCKETS.
- Chapter 4 (no ZeRO) all-reduces after backward: DeepSpeed's engine, backward_epilogue. No overlap.
- Chapter 5, stage 1: each gradient is reduced to one owner, then parameters are all-gathered. gloo's reduce is a ring's
  reduce-scatter and a gather to the owner (gloo/reduce.cc), which takes that link as long as an all-reduce: 2 P. With
  the all-gather 3 P, where an all-reduce passes 2 P. Stage 3: an all-reduce in place of the reduce-scatter, which gloo
  lacks, and two all-gathers: 4 P (assets/records/collectives.jsonl counts them). Stage 1 does not overlap (overlap_comm
  is false); stage 3 fetches ahead, but how much that hides on a CPU is not known: taken as nothing.
- fp16 halves the bytes. Accumulation computes all but the last batch without communication.

"network" differs in two things, both from the network and from ranks that are alone. The gradients of a layer are ready
when backward, which takes twice the products of forward, and the first layer once, has come to it: most of this
network's parameters are in a layer that backward reaches soon, most of its products in one that it reaches later.
Tensors go in DDP's own buckets, and in Horovod each on its own. And jitter is that of the steps of ranks alone, not of
V100s.
"""

import re
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf

from launch import ROOT

sys.path.append(str(ROOT / "03_ddp"))
import cost_model
from cost_model import CENTRAL, MB, Cluster, Constants

sys.path.remove(str(ROOT / "03_ddp"))  # where other chapters have files of the same names

PREDICTIONS = ("model", "network")
cost_model.BUCKETS |= {"DDP, bucket": (MB, MB), "DDP, one": (inf, inf)}  # what slow_link.py tries beside DDP's own
PASSED = {("05_zero", 1): 3 / 2, ("05_zero", 3): 4 / 2}  # beside an all-reduce of all gradients
NO_OVERLAP = ("04_deepspeed", "05_zero")
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def rate_of(link: str) -> float:
    """Bytes/s in one direction, nominal: of 1gbit, 125e6; without a limit, infinite."""
    if link == "none":
        return inf
    number, unit = re.fullmatch(r"([\d.]+)([kmg])bit", link).groups()
    return float(number) * UNITS[unit] / 8


def cluster_of(nodes: int, link: str) -> Cluster:
    """One rank a node, all-reduced in a ring, as gloo does."""
    return Cluster(nodes, 1, rate_of(link), inf, "ring")


# --- the cnn, as chapters 2 to 4 build it ---

def layers(side: int = 32, channels: int = 3) -> list[tuple[list[int], float]]:
    """Of each layer, from the last to the first: bytes of bias and weight, and products of backward for an image."""
    half = (side - 4) // 2
    forward = [(channels * 9, 32, (side - 2) ** 2), (32 * 9, 64, (side - 4) ** 2), (64 * half * half, 128, 1),
               (128, 10, 1)]  # inputs, outputs, places
    found = [([4 * outputs, 4 * inputs * outputs], 2.0 * inputs * outputs * places)
             for inputs, outputs, places in forward]
    found[0] = (found[0][0], found[0][1] / 2)  # nobody asks for the gradient of the images
    return found[::-1]


def ready(buckets: str, **shape: int) -> list[tuple[float, float]]:
    """(bytes, share of a step's computing after which they are ready), in the order in which they are sent.

    A bucket is closed by the tensor that fills it. Horovod sends each tensor when it is there.
    """
    first, other = {"Horovod": (1, 1)}.get(buckets) or cost_model.BUCKETS[buckets]
    network = layers(**shape)
    backward = sum(products for _, products in network)
    whole = backward + sum(products / 2 for _, products in network[:-1]) + network[-1][1]  # with forward
    found, size, done = [], 0.0, whole - backward
    for number, (tensors, products) in enumerate(network):
        done += products
        for place, tensor in enumerate(tensors):
            size += tensor
            last = number == len(network) - 1 and place == len(tensors) - 1
            if last or size >= (other if found else first):
                found.append((size, done / whole))
                size = 0.0
    return found


def network_seconds(compute: float, sizes: Iterable[tuple[float, float]], cluster: Cluster, overlap: bool,
                    constants: Constants) -> float:
    """cost_model.step_seconds with buckets that are ready after these shares of the computing."""
    compute *= 1 + constants.jitter * cost_model.slowest(cluster.ranks)
    free = 0.0
    for size, share in sizes:
        start = share * compute if overlap else compute
        free = max(start, free) + cost_model.all_reduce_seconds(size, cluster, constants)
    return max(compute, free)


# --- the runs ---

def spread(times: list[float]) -> float:
    """The standard deviation beside the median, as the quartiles have it: one late step in ten does not count."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / 1.349 / middle


def key(record: Mapping, batch: int | None = None) -> tuple:
    """What tells the base of a run: chapter, stage, images of a rank in a batch, ranks at once."""
    return record["chapter"], record.get("stage"), batch or record["batch_size"], record["at_once"]


class Predictions:
    """From the records of ranks alone: those with `at_once`, how many there were at the same time."""

    def __init__(self, records: Iterable[Mapping]):
        found, times = {}, {}
        for record in records:
            if not record.get("at_once"):
                continue
            found.setdefault((record.get("program"), *key(record)), []).append(record["step_seconds"])
            if "times" in record and record["way"] == "plain":
                middle = statistics.median(record["times"])
                times.setdefault(record["at_once"], []).extend(each / middle for each in record["times"])
        self.base = {name: statistics.median(seconds) for name, seconds in found.items()}
        self.jitter = {ranks: spread(steps) for ranks, steps in times.items()}

    def compute(self, record: Mapping) -> float:
        """Seconds of a batch of this run on ranks that are alone, as many at once as it has nodes."""
        batch = record["batch_size"]
        if record.get("way") == "accumulate":
            batch //= 4
        return self.base[record.get("program"), *key(record | {"at_once": record["nodes"]}, batch)]

    def seconds(self, record: Mapping, prediction: str = "model") -> float:
        """A step of this run, of which only chapter, way, nodes, link, batch and bytes of gradients are looked at."""
        compute, way = self.compute(record), record.get("way", "plain")
        before = 3 * compute if way == "accumulate" else 0.0
        size = record["gradient_bytes"] * PASSED.get((record["chapter"], record.get("stage")), 1)
        part = 0.5 if way == "fp16" else 1.0
        cluster, overlap = cluster_of(record["nodes"], record["link"]), record["chapter"] not in NO_OVERLAP
        library = "Horovod" if record["chapter"].startswith("02") else "DDP"
        if way in ("bucket", "one"):
            library = f"DDP, {way}"
        if prediction == "model":
            return before + cost_model.step_seconds(compute, size * part, cluster, library, overlap)
        constants = replace(CENTRAL, jitter=self.jitter[record["nodes"]])
        sizes = [(size, 1.0)]
        if overlap:
            sizes = [(each * part, share) for each, share in ready(library, side=record["image_size"])]
        return before + network_seconds(compute, sizes, cluster, overlap, constants)

    def images_per_second(self, record: Mapping, prediction: str = "model") -> float:
        return record["global_batch_size"] / self.seconds(record, prediction)
