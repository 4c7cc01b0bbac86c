"""Plan any program from what `cluster.footprint --results FILE` counted of one of its ranks.

A footprint of as many ranks is taken as it is. For another number of ranks each rank keeps its
batch: FLOPs and activations stay; the group of all data-parallel ranks grows, and with it the
share (n-1)/n that each rank sends; parameters, gradients and optimizer state shrink if they are
sharded, which all-gathers show.
"""

from dataclasses import dataclass

from cluster.plan.memory import Memory
from cluster.plan.step import CENTRAL, make_cluster
from workshop.gpus import Gpu

SHARDED = "parameters", "gradients", "master copy", "optimizer state"


@dataclass(frozen=True)
class Row:
    """What one rank needs and how long its step takes, on a number of GPUs."""
    gpus: int
    nodes: int
    exact: bool
    memory: Memory
    sent: float
    compute: float
    communication: float
    seconds: float


def growing_groups(footprint: dict) -> list[dict]:
    """Return what is sent by the groups that grow with the job: the largest between nodes."""
    sent = footprint["sent"]
    sent = [entry for entry in sent if entry["link"] != "inside a node"] or sent
    largest = max((entry["ranks"] for entry in sent), default=1)
    return [entry for entry in sent if entry["ranks"] == largest]


def plan_footprint(footprints: list[dict], gpu: Gpu, gpus: int, per_node: int, node_link: float,
                   gpu_link: float, share: float) -> Row:
    """Return a Row. share: of the rate of long matrix products that the program reaches."""
    ranks = [record["ranks"] for record in footprints]
    footprint = footprints[ranks.index(gpus) if gpus in ranks else -1]
    factor = gpus / footprint["ranks"]
    growing = growing_groups(footprint)
    cluster = make_cluster(gpus, per_node, node_link, gpu_link)
    sent = hidden = exposed = 0.0
    for entry in footprint["sent"]:
        size, stride = entry["ranks"], 1
        size_now = round(size * factor) if entry in growing else size
        if size_now <= 1:
            continue
        if size < footprint["ranks"] and entry["link"] != "inside a node":
            stride = footprint["ranks"] // size
        share = (1 - 1 / size_now) / (1 - 1 / size) if size > 1 else 1
        seconds = entry["bytes"] * share / cluster.group_rate(size_now, stride, CENTRAL.share)
        sent += entry["bytes"] * share
        if entry in growing:
            hidden += seconds
        else:
            exposed += seconds
    compute = sum(footprint["flops"].values()) / (gpu.peak * gpu.matmul_share * share)
    seconds = (max(compute, hidden) + CENTRAL.exposed * min(compute, hidden) + exposed)
    roles = footprint["memory"]
    is_sharded = any("gather" in entry["operation"] for entry in growing)
    state = sum(roles[role] / (factor if is_sharded else 1) for role in SHARDED)
    saved = sum(roles[role] for role in SHARDED)
    memory = Memory(state, roles["activations"],
                    roles["peak"] - saved - roles["activations"])
    return Row(gpus, cluster.nodes, gpus in ranks, memory, sent, compute, hidden + exposed, seconds)
