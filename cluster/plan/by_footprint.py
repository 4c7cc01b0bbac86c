"""Plan any program from what `cluster.footprint --results FILE` counted of one of its ranks.

A footprint of as many ranks is taken as it is. For another number of ranks each rank keeps its
batch: FLOPs and activations stay; the group of all data-parallel ranks grows, and with it the
share (n-1)/n that each rank sends; parameters, gradients and optimizer state shrink if they are
sharded, which all-gathers show. Seconds are by the rules of step.py: the all-reduce of a growing
group sends gradients in large buckets; all else takes turns with computation, in many calls.
"""

from dataclasses import dataclass

from cluster.plan.memory import Memory
from cluster.plan.step import CENTRAL, Cluster, exposed_seconds
from workshop.gpus import Gpu

SHARDED = "parameters", "gradients", "master copy", "optimizer state"
HOPS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}  # latencies of a call, per rank


@dataclass(frozen=True)
class Row:
    """What one rank needs and how long its step takes, on a number of GPUs."""
    is_counted: bool
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


def plan_footprint(footprints: list[dict], gpu: Gpu, cluster: Cluster, speed: float) -> Row:
    """Return a Row. speed: share of the rate of long matrix products that the program reaches."""
    exact = [record for record in footprints if record["ranks"] == cluster.ranks]
    footprint = (exact or footprints)[-1]  # the newest
    factor = cluster.ranks / footprint["ranks"]
    growing = growing_groups(footprint)
    sent = hidden = exposed = 0.0
    for entry in footprint["sent"]:
        size, stride = entry["ranks"], 1
        size_now = round(size * factor) if entry in growing else size
        if size_now <= 1:
            continue
        if size < footprint["ranks"] and entry["link"] != "inside a node":
            stride = footprint["ranks"] // size
        growth = (1 - 1 / size_now) / (1 - 1 / size) if size > 1 else 1
        sent += entry["bytes"] * growth
        share, hops = CENTRAL.share, HOPS.get(entry["operation"], 0)
        if entry in growing and entry["operation"] == "all-reduce":
            share, hops = CENTRAL.usable, 0
        seconds = (entry["bytes"] * growth / cluster.group_rate(size_now, stride, share)
                   + entry["calls"] * hops * CENTRAL.ring_hop * (size_now - 1))
        if entry in growing:
            hidden += seconds
        else:
            exposed += seconds
    compute = sum(footprint["flops"].values()) / (gpu.peak * gpu.matmul_share * speed)
    seconds = compute + exposed_seconds(hidden, compute) + exposed
    roles = footprint["memory"]
    is_sharded = any("gather" in entry["operation"] for entry in growing)
    kept = sum(roles[role] for role in SHARDED)
    memory = Memory(kept / factor if is_sharded else kept, roles["activations"],
                    roles["peak"] - kept - roles["activations"])
    return Row(bool(exact), memory, sent, compute, hidden + exposed, seconds)
