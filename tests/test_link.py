"""Numbers on compute against the link follow from the model."""

from dataclasses import replace
from math import inf

import pytest
from conftest import ROOT
from tolerances import ARITHMETIC, assert_close

from cluster.plan import link
from cluster.plan.step import CENTRAL, Cluster, transformer_step
from cluster.plan.transformer import Layout, Transformer
from workshop.gpus import read_gpus

PAGE = " ".join(word for name in ("03_ddp/README.md", "docs/PARALLELISM.md", "docs/SHEET.md")
                for word in (ROOT / name).read_text().split())


@pytest.mark.parametrize("way, zero, hiding", [("DDP", 0, 4 / 6), ("FSDP", 3, 1)])
@pytest.mark.parametrize("name, nodes", [("h100", 1), ("h100", 64), ("mi250x", 64)])
def test_at_the_limit_computing_takes_as_long_as_sending(way, zero, hiding, name, nodes):
    """In the model of a step with matrix products only; `hiding`: the share that can hide it."""
    gpu = read_gpus()[name]
    cluster = Cluster(nodes, gpu.gpus_per_node, gpu.node_link, gpu.gpu_link)
    products_only = replace(CENTRAL, attention=inf, other_bytes=0, ring_hop=0)
    tokens = link.hidden_from(way, gpu, nodes)
    model = Transformer(32, 4096, 32, context=1, vocabulary=128_000, tied=True)
    layout = Layout(cluster.ranks, zero=zero, micro_batch=tokens)
    step = transformer_step(model, layout, gpu, cluster, constants=products_only)
    many_ranks = cluster.ranks / (cluster.ranks - 1)
    ratio = step.data * many_ranks / (hiding * step.compute)
    assert_close("sending over computing", abs(ratio - 1), ARITHMETIC)


def test_the_page_s_arithmetic():
    h100 = read_gpus()["h100"]
    flops = 6 * 70e9 * 15e12
    days = flops / (0.4 * h100.peak * 1024) / 86400
    ddp_limit, limit = (link.hidden_from(way, h100, nodes=2) for way in ("DDP", "FSDP"))
    tokens = 3e6 / 4096
    deepseek = 6 * 37e9 * 14.8e12 / (2.664e6 * 3600 * h100.peak)
    slow = replace(h100, node_link=25e9)
    ddp, slow_ddp, fsdp, slow_fsdp = (link.send_seconds(way, gpu, nodes=2)
                                      for way in ("DDP", "FSDP") for gpu in (h100, slow))
    tensor = 1 + 4.5 * 4096 * h100.gpu_link * CENTRAL.share / (h100.peak * h100.matmul_share)
    step = 6 * 13e9 * 3e6 / (4096 * 0.4 * h100.peak)
    for text in (f"{flops / 1e24:.1f} x 10^24 FLOPs", f"{days:.0f} days",
                 f"feed {4e6 / limit:.0f} H100", f"{percent(CENTRAL.exposed)} of the sending",
                 f"{percent(deepseek)} of the peak", f"an H100 {h100.peak / h100.memory_rate:.0f}",
                 f"{1e12 * ddp:.0f} ms at 90 % of the 400 GB/s",
                 f"{1e12 * slow_ddp:.0f} ms at 200 Gbit/s",
                 f"{7e9 * ddp:.2f} and {7e9 * fsdp:.2f} s, at 25 GB/s (200 Gbit/s) "
                 f"{7e9 * slow_ddp:.1f} and {7e9 * slow_fsdp:.1f} s",
                 f"{int(tensor)} ranks for a width of 4,096",
                 f"{tokens:.0f} tokens per GPU, below DDP's {ddp_limit:,.0f} and FSDP's "
                 f"{limit:,.0f}",
                 f"{ddp_limit / tokens:.0f} stages", f"a step would take {step:.2f} s"):
        assert text in PAGE, text


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
