"""How long a step of DDP takes on many GPUs, from one GPU's compute time and the gradients' bytes.

    from cost_model import Cluster, step_seconds
    four = Cluster(nodes=4, gpus=8, node_link=3.1e9, gpu_link=80e9)
    step_seconds(compute=0.25, gradient_bytes=102e6, cluster=four)

Times are in seconds, sizes in bytes, rates in bytes/s in one direction. Not modelled: reading data,
other jobs' traffic.
"""

import math
from dataclasses import dataclass

import numpy as np

MB = 2**20
BUCKETS = {  # sizes of the first bucket and of all others
    "DDP": (1 * MB, 25 * MB),  # Li et al., 2006.15704, and DistributedDataParallel's defaults
    "Horovod": (64 * MB, 64 * MB)}  # fusion buffer, of the published runs: the default before 0.21


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

    They were chosen as the comments say, when all rows of assets/records/published.csv except
    VGG-16 on 128 GPUs and the DGX-2 were known.
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
    bucket, other_buckets = BUCKETS[library]
    remaining = gradient_bytes
    while remaining > 0.5:
        size = min(bucket, remaining)
        remaining -= size
        bucket = other_buckets
        fill_end += backward_end * constants.backward * size / gradient_bytes
        start = max(reduce_end, fill_end if overlap else backward_end)
        reduce_end = start + all_reduce_seconds(size, cluster, constants)
        spans.append(("all-reduce", start, reduce_end))
    return spans


def step_seconds(*step: object, **options: object) -> float:
    """Return the seconds of one step; the arguments are those of timeline."""
    return max(end for _, _, end in timeline(*step, **options))
