"""Checks for exercise 10: eight numbers of a plan, and the bytes that real ranks send."""

from pathlib import Path

import torch
from runner import load_exercise, on_ranks, record_calls

from workshop.gpus import read_gpus

RING = Path(__file__).resolve().parents[1] / "2_ring" / "solution.py"
RANKS, PARAMETERS, DDP_PARAMETERS = 4, 1.5e9, 100_000
PEAK = read_gpus()["h100"].peak
SPEED = "images/s on 2 nodes"
MEMORY = [f"GB per GPU, ZeRO stage {stage}" for stage in (1, 2, 3)]
TRAFFIC = "bytes sent per rank per DDP step"
FLOPS, MFU, TOKENS = "FLOPs of a step", "MFU in percent", "tokens per GPU and micro-batch"
EXPECTED = {
    # Two nodes have 8 GPUs, with 64 images each. A node sends 2 (n-1)/n of 100 MB, n = 2.
    SPEED: 8 * 64 / (0.25 + 100e6 / (0.9 * 1.25e9)),
    MEMORY[0]: PARAMETERS * (2 + 2 + 12 / RANKS) / 1e9,
    MEMORY[1]: PARAMETERS * (2 + 14 / RANKS) / 1e9,
    MEMORY[2]: PARAMETERS * 16 / RANKS / 1e9,
    TRAFFIC: 2 * (RANKS - 1) / RANKS * 4 * DDP_PARAMETERS,
    FLOPS: 6 * 7e9 * 4e6,
    MFU: 100 * 6 * 7e9 * 9000 / PEAK,
    # Seconds of a node's link and of a GPU, both per parameter, and of a GPU also per token.
    TOKENS: 8 / 400e9 / (6 / (0.4 * PEAK))}
MEMORY_HINT = ("16 bytes per parameter: which of 2, 2, 4 and 8 does this stage divide by the "
               "number of GPUs? A GB is 10**9 bytes here")
HINTS = dict.fromkeys(MEMORY, MEMORY_HINT) | {
    SPEED: "a step takes compute plus all-reduce. Each of n nodes sends 2 (n-1)/n of 100 MB, at "
           "nine tenths of 10 Gbit/s, which is 1.25 GB/s",
    TRAFFIC: "a ring sends (N-1)/N of the bytes, twice; an fp32 number has 4 bytes",
    FLOPS: "forward and backward together: 6 FLOPs per parameter and token",
    MFU: "the FLOPs of a second's tokens on one GPU, divided by the h100's peak_tflops of gpus.csv",
    TOKENS: "a node's link sends two all-gathers in bf16 and a reduce-scatter in fp32 for all its "
            "GPUs. In this time each GPU can compute 6 FLOPs per parameter for how many tokens?"}


def checks(file):
    """Yield (description, passed, hint), after printing a table of all answers."""
    answers = on_ranks(file, lambda rank: load_exercise(file).PLAN, 1, backend=None)[0]
    missing = [name for name in EXPECTED if not isinstance(answers.get(name), (int, float))]
    yield "all eight numbers are typed in", not missing, (
        f"{len(missing)} of the 8 values are not numbers; answers are shown once all "
        "eight are numbers")

    print(f"  {'':36} {'you':>15} {'computed':>15}")
    for name, value in EXPECTED.items():
        print(f"  {name:36} {answers[name]:15,.6g} {value:15,.6g}")
    sent_bytes = on_ranks(file, count_sent_bytes, RANKS)[0]
    print(f"  {RANKS} ranks have just sent, over the ring of exercise 2: {sent_bytes:,} bytes each")
    for name, value in EXPECTED.items():
        ratio = answers[name] / value
        yield f"{name}, within 5 %", abs(ratio - 1) <= 0.05, (
            f"your value is {ratio:.3g} times the computed one: {HINTS[name]}")


def count_sent_bytes(rank):
    """Return the bytes that a rank sends to sum fp32 gradients over the ring of exercise 2."""
    calls = record_calls()
    load_exercise(RING).ring_all_reduce(torch.zeros(DDP_PARAMETERS))
    return sum(4 * elements for name, elements, _ in calls if name == "isend")
