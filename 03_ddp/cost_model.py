"""How long a training step takes on many GPUs: a model that is small enough to be read.

    from cost_model import Cluster, step_seconds
    four = Cluster(nodes=4, gpus=8, node_link=3.1e9, gpu_link=80e9)
    step_seconds(compute=0.25, gradient_bytes=102e6, cluster=four)

A step is forward, backward and the all-reduce of the gradients, which are sent in buckets while
backward computes others. Times are in seconds, sizes in bytes, rates in bytes/s in one direction.
Not modelled: reading data, the optimizer, other jobs' traffic, kernels that run slower during
communication.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

MB = 2**20
BUCKETS = {  # sizes of the first bucket and of all others
    "DDP": (1 * MB, 25 * MB),  # Li et al., 2006.15704, and DistributedDataParallel's defaults
    "Horovod": (64 * MB, 64 * MB)}  # fusion buffer: the default before 0.21, by its documentation


def slowest(n: int) -> float:
    """Return the mean of the largest of n standard normal numbers.

    Expected delay of the slowest of n ranks, in standard deviations: the integral of x d(P(x)^n), P
    the normal distribution: David and Nagaraja, Order Statistics, section 3.1.
    """
    x = np.linspace(-8, 8, 4001)
    below = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x]) ** n
    return float(np.sum((x[1:] + x[:-1]) / 2 * np.diff(below)))


@dataclass(frozen=True)
class Constants:
    """Constants of the model, the same for every prediction.

    Calibrated in an earlier trial on all published rows except VGG-16 on 128 GPUs and the DGX-2.
    """
    # Share of compute time in backward. Assumed: two matrix products for each one of forward
    backward: float = 2 / 3
    # Usable share of a link's nominal rate. Assumed: protocol and headers take the rest
    usable: float = 0.90
    # Standard deviation of compute time, relative. Fitted to one row: 8 V100s of one node train
    # ResNet-50 in FP32 at 2,855 images/s, one at 367 (NVIDIA DeepLearningExamples, PyTorch, v1.5)
    jitter: float = (8 * 367 / 2855 - 1) / slowest(8)
    # Ring latency per hop, from GPU to GPU. Assumed
    hop: float = 3e-6
    # Tree latency per level between nodes, and once within the node. From 8 bytes on Polaris
    # (argonne-lcf/alcf-nccl-tests): 20-47, 46-124, 100-183 us on 2, 8, 256 nodes
    level: float = 20e-6


CENTRAL = Constants()
OPTIMIST = Constants(
    backward=3 / 4, usable=1.0, jitter=CENTRAL.jitter / 2, hop=1.5e-6, level=10e-6)
PESSIMIST = Constants(
    backward=1 / 2, usable=0.8, jitter=CENTRAL.jitter * 2, hop=6e-6, level=40e-6)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs.

    node_link: rate of a node, all its network cards together; gpu_link: rate of a GPU to others of
    its node. algorithm: "ring", one ring through all GPUs, or "tree", first within the
    node, then between nodes (NCCL since 2.4, and others before it). measured: node_link was
    measured with an all-reduce (bus bandwidth), so nothing is lost from it.
    """
    nodes: int
    gpus: int
    node_link: float
    gpu_link: float
    algorithm: str = "tree"
    measured: bool = False

    @property
    def ranks(self):
        return self.nodes * self.gpus


def all_reduce_seconds(size: float, cluster: Cluster, constants: Constants = CENTRAL) -> float:
    """Return the seconds of an all-reduce: 2 (n-1)/n of the bytes over the slower link.

    Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009) 117, for the bytes. Latency: a
    ring of N ranks has 2 (N-1) hops, a tree one level within the node and log2(nodes) between them.
    """
    nodes, gpus, ranks = cluster.nodes, cluster.gpus, cluster.ranks
    if ranks == 1:
        return 0.0
    if cluster.algorithm == "tree":
        between, within = (nodes - 1) / nodes, (gpus - 1) / gpus
        latency = constants.level * (1 + math.log2(nodes))
    else:
        between = (ranks - 1) / ranks if nodes > 1 else 0
        within = (ranks - 1) / ranks if gpus > 1 else 0
        latency = constants.hop * 2 * (ranks - 1)
    node_rate = cluster.node_link * (1 if cluster.measured else constants.usable)
    gpu_rate = cluster.gpu_link * constants.usable
    return latency + max(2 * between * size / node_rate, 2 * within * size / gpu_rate)


def measured_link(records: list[dict]) -> tuple[float, float]:
    """Return bytes/s of a node and seconds of a level, from records of submit/doctor.py --results.

    Solves the tree's formulas of all_reduce_seconds for both. Raises ValueError if the records are
    not from two or more nodes, or if more bytes took no longer.
    """
    records = [record for record in records if "all_reduce" in record and record["nodes"] > 1]
    nodes = records[-1]["nodes"] if records else 0
    records = [record for record in records if record["nodes"] == nodes]
    library = "NCCL" if any(record["all_reduce"] == "NCCL" for record in records) else "gloo"
    times = {record["bytes"]: record["seconds"] for record in records
             if record["all_reduce"] == library}
    if len(times) < 3:
        raise ValueError("no all-reduces on two or more nodes: run doctor.py --results FILE there")
    smaller, largest = sorted(times)[-2:]
    seconds_per_byte = (times[largest] - times[smaller]) / (largest - smaller)
    if seconds_per_byte <= 0:
        raise ValueError("more bytes took no longer in these all-reduces: measure again")
    return 2 * (nodes - 1) / nodes / seconds_per_byte, times[min(times)] / (1 + math.log2(nodes))


def bucket_sizes(gradient_bytes: float, library: str = "DDP") -> list[float]:
    """Return the buckets in the order in which backward fills them; their sum is gradient_bytes."""
    first, other = BUCKETS[library]
    sizes = [min(first, gradient_bytes)]
    while (left := gradient_bytes - sum(sizes)) > 0.5:
        sizes.append(min(other, left))
    return sizes


def timeline(compute: float, gradient_bytes: float, cluster: Cluster, library: str = "DDP",
             overlap: bool = True, constants: Constants = CENTRAL) -> list[tuple]:
    """Return the parts of one step as (what, start, end), in seconds.

    `compute` is one GPU's forward and backward without communication. Backward fills the buckets
    at an even pace (assumed); a bucket is all-reduced when all ranks have filled it and the
    previous one is done. All ranks wait for the slowest. Without overlap the all-reduces come after
    backward.
    """
    computed = compute * (1 + constants.jitter * slowest(cluster.ranks))
    filled = free = computed * (1 - constants.backward)
    spans = [("forward", 0.0, filled), ("backward", filled, computed)]
    for size in bucket_sizes(gradient_bytes, library):
        filled += computed * constants.backward * size / gradient_bytes
        start = max(free, filled if overlap else computed)
        free = start + all_reduce_seconds(size, cluster, constants)
        spans.append(("all-reduce", start, free))
    return spans


def step_seconds(*step: object, **options: object) -> float:
    """Return the seconds of one step; the arguments are those of timeline."""
    return max(end for _, _, end in timeline(*step, **options))


def plan(images: float, compute: Callable[[int], float], batch: int, largest_batch: float,
         gradient_bytes: float, cluster: Cluster, node_counts: list[int],
         **options: object) -> list[dict]:
    """Return throughput and time to train for each number of nodes, as dicts.

    compute(b): seconds for one GPU to compute a batch of b. Each GPU gets `batch` images per step
    while the global batch stays within `largest_batch`; beyond that, fewer (but at least one).
    """
    rows = []
    for nodes in node_counts:
        enlarged = replace(cluster, nodes=nodes)
        part = int(min(batch, largest_batch / enlarged.ranks))
        if part == 0:
            break
        seconds = step_seconds(compute(part), gradient_bytes, enlarged, **options)
        rows.append({"nodes": nodes, "batch": part,
                     "images_per_second": part * enlarged.ranks / seconds,
                     "hours": images * seconds / (part * enlarged.ranks) / 3600})
    return rows


def worth_asking_for(rows: list[dict], gain: float = 1.5) -> int:
    """Return the most nodes of a plan up to which every doubling gained at least `gain`.

    Each row has twice the nodes of the one before. gain=1.5: each doubling saves at least a third
    of the time, and costs at most a third more node hours.
    """
    best = rows[0]
    for before, after in zip(rows, rows[1:]):
        if before["hours"] / after["hours"] < gain:
            break
        best = after
    return best["nodes"]


def predict(row, constants=CENTRAL, **changes):
    """Return images/s of a row of assets/records/published.csv; changes go to step_seconds.

    One GPU's compute time is taken from the row's base run, on a single GPU or the GPUs of one
    node.
    """
    one_gpu = row["base_images_per_second"] / row["base_gpus"]
    compute = row["batch"] / one_gpu / (1 + constants.jitter * slowest(row["base_gpus"]))
    names = "nodes", "gpus", "node_link", "gpu_link", "algorithm", "measured"
    cluster = Cluster(**{name: row[name] for name in names})
    step = step_seconds(compute, row["gradient_bytes"], cluster, row["buckets"],
                        constants=constants, **changes)
    return cluster.ranks * row["batch"] / step
