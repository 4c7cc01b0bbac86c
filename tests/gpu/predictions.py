"""How wrong are footprint's memory and plan's seconds of a step, on this node?"""

import sys

import torch
from nccl import outcome

from cluster.launch import ROOT, finish_job, start_job
from cluster.records import read_records
from workshop.gpus import find_gpu

GPT = ("05_zero/fsdp.py", "--text", "synthetic", "--context", 1024, "--precision", "bf16")
LARGE = ("--layers", 24, "--width", 2048, "--heads", 16)
RESNET = ("03_ddp/main.py", "--dataset", "synthetic", "--model", "resnet50", "--image-size", 224,
          "--lr", 0.001)
CASES = {
    "GPT": (*GPT, *LARGE, "--batch-size", 16),
    "GPT, activation checkpointing": (*GPT, *LARGE, "--batch-size", 32,
                                      "--activation-checkpointing"),
    "small GPT": (*GPT, "--layers", 12, "--width", 768, "--heads", 12, "--batch-size", 64),
    "ResNet-50, bf16": (*RESNET, "--precision", "bf16", "--batch-size", 256),
    "ResNet-50, fp32": (*RESNET, "--batch-size", 128)}
SMALL_CASES = {"GPT": ("05_zero/fsdp.py", "--text", "synthetic")}  # for a CPU


def predictions(jobs):
    """How wrong are footprint's peak of memory and plan's seconds of a step?"""
    from cluster.plan.by_footprint import plan_footprint  # these need pandas
    from cluster.plan.check import computing_share, read_runs
    from cluster.plan.step import Cluster
    ranks = 1 if jobs.ranks_share else jobs.several[-1]
    gpu = jobs.device == "gpu" and find_gpu(torch.cuda.get_device_name())
    for name, (program, *flags) in (CASES if jobs.device == "gpu" else SMALL_CASES).items():
        counted, measured = jobs.folder / f"{name} counted", jobs.folder / f"{name} measured"
        counting = finish_job(start_job([
            sys.executable, "-m", "cluster.footprint", "--ranks", ranks, "--gpus-per-node", ranks,
            "--tensors", "fake", "--results", counted, program, *flags]))
        code, output = jobs.run(ranks, ROOT / program, *flags, "--max-steps", 20, "--device",
                                jobs.device, "--results", measured)
        if code or counting.returncode:
            yield outcome(name, False, counting.stdout + output)
            continue
        footprint, record = read_records(counted)[0], read_records(measured)[0]
        peak = footprint["memory"]["peak"]
        facts = {"peak": record["peak_memory_bytes"], "counted": peak,
                 "counted/peak": round(peak / record["peak_memory_bytes"], 3),
                 "step_seconds": record["step_seconds"]}
        if gpu:
            cluster = Cluster(1, ranks, gpu.node_link, gpu.gpu_link)
            seconds = plan_footprint([footprint], gpu, cluster,
                                     computing_share(read_runs())).seconds
            facts |= {"planned": round(seconds, 4),
                      "planned/measured": round(seconds / record["step_seconds"], 3)}
        yield outcome(name, True, output, flags=[program, *flags], ranks=ranks, **facts)
