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
    "Horovod": (64 * MB, 64 * MB),  # fusion buffer, of the published runs: the default before 0.21
    "Horovod 0.21": (128 * MB, 128 * MB)}  # the default since (horovod/horovod, pull request 2468)


def slowest_delay(n: int) -> float:
    """Return the expected delay of the slowest of n ranks, in standard deviations.

    This is the mean of the largest of n standard normal numbers: the integral of x d(P(x)^n), where
    P is the normal distribution (David and Nagaraja, Order Statistics, section 3.1).
    """
    x = np.linspace(-8, 8, 4001)
    midpoints = (x[1:] + x[:-1]) / 2
    normal = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x])
    return float(np.sum(midpoints * np.diff(normal ** n)))


@dataclass(frozen=True)
class Constants:
    """Constants of the model, the same for every prediction.

    Chosen as the comments say, when all rows of assets/records/published.csv except VGG-16 on 128
    GPUs and the DGX-2 were known.
    """
    # Share of compute time in backward. Assumed: twice as many matrix products as in forward
    backward: float = 2 / 3
    # Usable share of a link's nominal rate. Assumed: protocol and headers take the rest
    usable: float = 0.90
    # Standard deviation of compute time, relative. Fitted to one row: 8 V100s of one node train
    # ResNet-50 in FP32 at 2,855 images/s, one at 367 (NVIDIA DeepLearningExamples, PyTorch, v1.5)
    jitter: float = (8 * 367 / 2855 - 1) / slowest_delay(8)
    # Ring latency per hop, from GPU to GPU. Assumed
    hop: float = 3e-6
    # Tree latency per level between nodes, and once within the node. From all-reduces of 8 bytes
    # on Polaris (argonne-lcf/alcf-nccl-tests): 20-47, 46-124, 100-183 us on 2, 8, 256 nodes
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
    node, then between nodes (NCCL since 2.4; other libraries earlier). measured: node_link was
    measured with an all-reduce (bus bandwidth), so Constants.usable does not apply to it.
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
        node_share, gpu_share = (nodes - 1) / nodes, (gpus - 1) / gpus
        latency = constants.level * (1 + math.log2(nodes))
    else:
        node_share = (ranks - 1) / ranks if nodes > 1 else 0
        gpu_share = (ranks - 1) / ranks if gpus > 1 else 0
        latency = constants.hop * 2 * (ranks - 1)
    node_rate = cluster.node_link * (1 if cluster.measured else constants.usable)
    gpu_rate = cluster.gpu_link * constants.usable
    return latency + max(2 * node_share * size / node_rate, 2 * gpu_share * size / gpu_rate)


def measured_link(records: list[dict]) -> tuple[float, float]:
    """Return bytes/s of a node and seconds of a level, from records of cluster/doctor.py --results.

    Solves all_reduce_seconds, with its tree, for both. Raises ValueError if no records are from
    two or more nodes, or if more bytes took no longer.
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
        raise ValueError("the largest all-reduce was no slower than a smaller one: measure again")
    return 2 * (nodes - 1) / nodes / seconds_per_byte, times[min(times)] / (1 + math.log2(nodes))


def bucket_sizes(gradient_bytes: float, library: str = "DDP") -> list[float]:
    """Return the buckets in the order in which backward fills them; their sum is gradient_bytes."""
    first, other = BUCKETS[library]
    sizes = [min(first, gradient_bytes)]
    while (remaining := gradient_bytes - sum(sizes)) > 0.5:
        sizes.append(min(other, remaining))
    return sizes


def timeline(compute: float, gradient_bytes: float, cluster: Cluster, library: str = "DDP",
             overlap: bool = True, constants: Constants = CENTRAL) -> list[tuple]:
    """Return the parts of one step as (name, start, end), in seconds.

    `compute` is one GPU's forward and backward without communication. Backward fills the buckets
    at an even pace (assumed). A bucket's all-reduce starts when all ranks have filled the bucket
    and the previous all-reduce has ended; without overlap, not before the end of backward.
    """
    backward_end = compute * (1 + constants.jitter * slowest_delay(cluster.ranks))
    forward_end = backward_end * (1 - constants.backward)
    spans = [("forward", 0.0, forward_end), ("backward", forward_end, backward_end)]
    fill_end = reduce_end = forward_end  # of the previous bucket
    for size in bucket_sizes(gradient_bytes, library):
        fill_end += backward_end * constants.backward * size / gradient_bytes
        start = max(reduce_end, fill_end if overlap else backward_end)
        reduce_end = start + all_reduce_seconds(size, cluster, constants)
        spans.append(("all-reduce", start, reduce_end))
    return spans


def step_seconds(*step: object, **options: object) -> float:
    """Return the seconds of one step; the arguments are those of timeline."""
    return max(end for _, _, end in timeline(*step, **options))


def plan(images: float, compute: Callable[[int], float], batch: int, largest_batch: float,
         gradient_bytes: float, cluster: Cluster, node_counts: list[int],
         **options: object) -> list[dict]:
    """Return throughput and time to train for each number of nodes, as dicts.

    images: of all epochs together. compute(b): seconds for one GPU to compute a batch of b. Each
    GPU gets `batch` images per step, or fewer if the global batch would exceed `largest_batch`. The
    plan ends before a GPU gets none.
    """
    rows = []
    for nodes in node_counts:
        cluster = replace(cluster, nodes=nodes)
        rank_batch = int(min(batch, largest_batch / cluster.ranks))
        if rank_batch == 0:
            break
        seconds = step_seconds(compute(rank_batch), gradient_bytes, cluster, **options)
        images_per_second = rank_batch * cluster.ranks / seconds
        rows.append({"nodes": nodes, "batch": rank_batch, "images_per_second": images_per_second,
                     "hours": images / images_per_second / 3600})
    return rows


def worth_asking_for(rows: list[dict], gain: float = 1.5) -> int:
    """Return the number of nodes up to which every doubling divides the hours by at least `gain`.

    rows: a plan in which each row has twice the nodes of the row before. gain=1.5: a doubling
    saves at least a third of the hours, and costs at most a third more node hours.
    """
    best = rows[0]
    for smaller, larger in zip(rows, rows[1:]):
        if smaller["hours"] / larger["hours"] < gain:
            break
        best = larger
    return best["nodes"]


def predict(row, constants=CENTRAL, **changes):
    """Return images/s of a row of assets/records/published.csv; changes go to step_seconds.

    One GPU's compute time comes from the row's base run, on one GPU or the GPUs of one node.
    """
    one_gpu = row["base_images_per_second"] / row["base_gpus"]
    compute = row["batch"] / one_gpu / (1 + constants.jitter * slowest_delay(row["base_gpus"]))
    names = "nodes", "gpus", "node_link", "gpu_link", "algorithm", "measured"
    cluster = Cluster(**{name: row[name] for name in names})
    step = step_seconds(compute, row["gradient_bytes"], cluster, row["buckets"],
                        constants=constants, **changes)
    return cluster.ranks * row["batch"] / step
