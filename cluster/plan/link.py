"""From how many tokens on a GPU's computation hides what DDP and FSDP send; chapter 3 derives it.

    python -m cluster.plan.link
"""

import pandas

from cluster.plan.step import CENTRAL, Cluster, Constants
from workshop.gpus import Gpu, read_gpus

BACKWARD_FLOPS = 4  # per token and parameter; forward has 2
# Bytes per parameter that a rank sends while backward computes, without the factor (N-1)/N. DDP:
# an all-reduce of fp32 gradients; FSDP: an all-gather of bf16 parameters, their reduce-scatter
SENT = {"DDP": 2 * 4, "FSDP": 2 + 4, "bf16 gradients": 2 * 2}


def reached(gpu: Gpu) -> float:
    """Return the FLOP/s of long matrix products."""
    return gpu.peak * gpu.matmul_share


def link_rate(gpu: Gpu, nodes: int, constants: Constants = CENTRAL) -> float:
    """Return bytes/s of a collective of all GPUs beside computation, on the slowest link."""
    cluster = Cluster(nodes, gpu.gpus_per_node, gpu.node_link, gpu.gpu_link)
    return cluster.group_rate(cluster.ranks, 1, constants)


def hidden_from(gpu: Gpu, nodes: int, sent: float, constants: Constants = CENTRAL) -> float:
    """Return the tokens per GPU from which backward takes longer than sending.

    sent: bytes per parameter. The number of parameters cancels.
    """
    return sent / BACKWARD_FLOPS * reached(gpu) / link_rate(gpu, nodes, constants)


def table(names: tuple[str, ...] = ("h100", "a100", "mi250x")) -> str:
    """Return the tokens per GPU for these GPUs, as text."""
    gpus, rows = read_gpus(), []
    for name in names:
        gpu = gpus[name]
        for nodes, place in ((1, "in a node"), (2, "across nodes")):
            rows.append({
                "GPU": name, "collective": place, "C [TFLOP/s]": f"{reached(gpu) / 1e12:.0f}",
                "W [GB/s]": f"{link_rate(gpu, nodes) / 1e9:.0f}",
                **{way: f"{hidden_from(gpu, nodes, sent):,.0f}" for way, sent in SENT.items()}})
    return "tokens per GPU from which backward hides the link\n" + pandas.DataFrame(
        rows).to_string(index=False)


if __name__ == "__main__":
    print(table())
