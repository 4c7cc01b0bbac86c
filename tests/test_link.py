"""Numbers on compute against the link and the memory follow from the model and the logs."""

import re
from dataclasses import replace
from math import inf

import pytest
import torch
from conftest import ROOT
from tolerances import ARITHMETIC, assert_close
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet50

from cluster.plan import link
from cluster.plan.step import CENTRAL, Cluster, transformer_step
from cluster.plan.transformer import Layout, Transformer
from workshop.gpus import read_gpus

RECORDS = ROOT / "assets" / "records"
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


def test_the_numbers_of_resnet50_on_the_page():
    gpu = read_gpus()["h200"]
    with torch.device("meta"):
        model, image = resnet50(num_classes=10), torch.zeros(1, 3, 224, 224)
    with FlopCounterMode(display=False) as counter:
        model(image)
    forward, parameters = counter.get_total_flops(), sum(p.numel() for p in model.parameters())
    training = 3 * forward
    plain = re.search(r"bf16, channels last +([\d.]+) images/s", read("gpu_first.txt"))
    speed = float(plain[1])
    tokens = training / (6 * parameters)  # of an image
    at_this_rate = replace(gpu, matmul_share=speed * training / gpu.peak)
    needed = link.hidden_from("DDP", at_this_rate, nodes=2) / tokens
    for text in (f"{forward / 1e9:.1f} GFLOPs in forward",
                 f"{speed:,.0f} images/s are {speed * training / gpu.peak:.1%}".replace("%", " %"),
                 f"{gpu.peak / gpu.memory_rate:.0f} FLOPs",
                 f"counts as {tokens:.0f} tokens: {training / 1e9:.1f} GFLOPs over "
                 f"6 x {parameters / 1e6:.1f} million",
                 f"needs only {needed:.0f} images"):
        assert text in PAGE, text


def test_the_shares_of_kernels_on_the_page():
    """Of the fifteen longest kernels of three steps of 256 images."""
    log = read("gpu_fourth.txt")
    total = 1000 * int(re.search(r"(\d+) ms in [\d,]+ kernels", log)[1])
    spent = dict.fromkeys(("batch_norm", "elementwise", "conv"), 0)
    for time, name in re.findall(r"^ +(\d+) us  (.*)$", log, re.M):
        kind = ("conv" if re.search("gemm|Conv|cutlass", name) else
                next((kind for kind in spent if kind in name), "other"))
        spent[kind] = spent.get(kind, 0) + int(time)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        resnet50(num_classes=10)(torch.zeros(256, 3, 224, 224))
    rate = 3 * 3 * counter.get_total_flops() / spent["conv"] * 1e6 / read_gpus()["h200"].peak
    for text in (f"kernels take {percent(spent['batch_norm'] / total)} of the GPU's time",
                 f"at least {percent(spent['elementwise'] / total)}.",
                 f"at least {percent(spent['conv'] / total)}, so even they reach at most "
                 f"{percent(rate)}"):
        assert text in PAGE, text


def test_the_page_s_arithmetic():
    h100 = read_gpus()["h100"]
    flops = 6 * 70e9 * 15e12
    days = flops / (0.4 * h100.peak * 1024) / 86400
    ddp_limit, limit = (link.hidden_from(way, h100, nodes=2) for way in ("DDP", "FSDP"))
    tokens = 3e6 / 4096
    deepseek = 6 * 37e9 * 14.8e12 / (2.664e6 * 3600 * h100.peak)
    slow = replace(h100, node_link=25e9)
    ddp, slow_ddp = (link.send_seconds("DDP", gpu, nodes=2) for gpu in (h100, slow))
    tensor = 1 + 4.5 * 4096 * h100.gpu_link * CENTRAL.share / (h100.peak * h100.matmul_share)
    step = 6 * 13e9 * 3e6 / (4096 * 0.4 * h100.peak)
    for text in (f"{flops / 1e24:.1f} x 10^24 FLOPs", f"{days:.0f} days",
                 f"feed {4e6 / limit:.0f} H100", f"{percent(CENTRAL.exposed)} of the sending",
                 f"{percent(deepseek)} of the peak", f"an H100 {h100.peak / h100.memory_rate:.0f}",
                 f"{1e12 * ddp:.0f} ms at 90 % of the 400 GB/s",
                 f"{1e12 * slow_ddp:.0f} ms at 200 Gbit/s",
                 f"{int(tensor)} ranks for a width of 4,096",
                 f"{tokens:.0f} tokens per GPU, below DDP's {ddp_limit:,.0f} and FSDP's "
                 f"{limit:,.0f}",
                 f"{ddp_limit / tokens:.0f} stages", f"a step would take {step:.2f} s"):
        assert text in PAGE, text


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def read(name: str) -> str:
    return (RECORDS / name).read_text()
