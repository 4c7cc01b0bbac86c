"""The GPUs that we know the speed of: gpus.csv, with sources."""

import csv
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """A GPU and the usual node around it.

    peak: FLOP/s of dense matrix products in bf16 (fp16 on V100); memory: bytes that a program can
    have; memory_rate, gpu_link (to the GPUs of its node), node_link (all network cards together):
    bytes/s in one direction; matmul_share: share of the peak that long matrix products reach.
    Its source, the last words of `source`, is a fit to published runs or an assumption.
    """
    name: str
    peak: float
    memory: float
    memory_rate: float
    gpu_link: float
    node_link: float
    gpus_per_node: int
    matmul_share: float
    source: str


def read_gpus() -> dict[str, Gpu]:
    """Return the rows of gpus.csv by name."""
    with (Path(__file__).parent / "gpus.csv").open(newline="") as file:
        return {row["name"]: Gpu(
            row["name"], float(row["peak_tflops"]) * 1e12, float(row["memory_gib"]) * 2**30,
            float(row["memory_tb_s"]) * 1e12, float(row["gpu_link_gb_s"]) * 1e9,
            float(row["node_link_gb_s"]) * 1e9, int(row["gpus_per_node"]),
            float(row["matmul_share"]), row["source"]) for row in csv.DictReader(file)}


def find_gpu(device_name: str) -> Gpu | None:
    """Return the GPU of a name that torch.cuda.get_device_name() returns, or None.

    The names: torch's CUDA names them as nvidia-smi does, such as "NVIDIA A100-SXM4-40GB".
    """
    gpus, words = read_gpus(), re.split(r"[ -]", device_name.lower())
    if not {"pcie", "nvl", "mig"}.isdisjoint(words):  # slower than those of gpus.csv
        return None
    if "a100" in words and "40gb" in words:
        return gpus["a100-40"]
    return next((gpus[word] for word in words if word in gpus), None)
