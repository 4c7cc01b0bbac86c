"""From how many tokens per GPU computation hides what DDP and FSDP send, and how long that takes.

Chapter 3 derives it.

    python -m cluster.plan.link
"""

import pandas

from cluster.plan.step import CENTRAL, Cluster
from workshop.gpus import Gpu, read_gpus

# Bytes per parameter that a rank sends in a step, and in backward, without the factor (N-1)/N; the
# share of the link's rate. Backward has 4 FLOPs per token and parameter to hide its part. DDP: an
# all-reduce of fp32 gradients, in backward. FSDP: an all-gather of bf16 parameters in forward and
# another in backward, with a reduce-scatter of fp32 gradients
WAYS = {"DDP": (2 * 4, 2 * 4, CENTRAL.usable), "FSDP": (2 + 2 + 4, 2 + 4, CENTRAL.share)}
BACKWARD_FLOPS = 4


def send_seconds(way: str, gpu: Gpu, nodes: int) -> float:
    """Return how long a step sends for each parameter."""
    sent, _, share = WAYS[way]
    cluster = Cluster(nodes, gpu.gpus_per_node, gpu.node_link, gpu.gpu_link)
    return sent / cluster.group_rate(cluster.ranks, 1, share)


def hidden_from(way: str, gpu: Gpu, nodes: int) -> float:
    """Return the tokens per GPU from which backward takes longer than what it sends.

    Both are proportional to the number of parameters, so it cancels.
    """
    sent, sent_in_backward, _ = WAYS[way]
    seconds = send_seconds(way, gpu, nodes) * sent_in_backward / sent
    return seconds * gpu.peak * gpu.matmul_share / BACKWARD_FLOPS


def table() -> str:
    """Return the tokens, and the milliseconds of sending, for three GPUs, as text."""
    gpus, rows = read_gpus(), []
    for name in ("h100", "a100", "mi250x"):
        gpu = gpus[name]
        places = {"in a node": (1, gpu.gpu_link), "across nodes": (2, gpu.node_link)}
        for place, (nodes, link) in places.items():
            rows.append({
                "GPU": name, "C [TFLOP/s]": f"{gpu.peak * gpu.matmul_share / 1e12:.0f}",
                "ranks": place, "link [GB/s]": f"{link / 1e9:.0f}",
                **{way: f"{hidden_from(way, gpu, nodes):,.0f}" for way in WAYS},
                **{f"{way} [ms]": f"{1e3 * 1e9 * send_seconds(way, gpu, nodes):.0f}"
                   for way in WAYS}})
    return ("tokens per GPU from which computation hides what is sent; ms to send it, "
            "for 10^9 parameters\n" + pandas.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    print(table())
