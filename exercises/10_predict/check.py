"""Checks for exercise 10: predictions, formulas, and bytes on real ranks."""

from pathlib import Path

import torch
from runner import load_exercise, on_ranks, record_calls

RING = Path(__file__).resolve().parents[1] / "2_ring" / "solution.py"
RANKS, PARAMETERS, SMALL = 4, 1.5e9, 100_000
SPEED = "images/s on 2 nodes"
BYTES = [f"GB per GPU, ZeRO stage {stage}" for stage in (1, 2, 3)]
SENT = "bytes sent per rank per DDP step"
FORMULAS = {
    # two nodes of 4 GPUs, 64 images each; a node sends 2 (n-1)/n of 100 MB
    SPEED: 8 * 64 / (0.25 + 100e6 / (0.9 * 1.25e9)),
    BYTES[0]: PARAMETERS * (2 + 2 + 12 / RANKS) / 1e9,
    BYTES[1]: PARAMETERS * (2 + 14 / RANKS) / 1e9,
    BYTES[2]: PARAMETERS * 16 / RANKS / 1e9,
    SENT: 2 * (RANKS - 1) / RANKS * 4 * SMALL}
BYTES_HINT = ("16 bytes per parameter: which of 2, 2, 4 and 8 does this stage divide by the number "
              "of GPUs? A GB is 10**9 bytes here")
HINTS = dict.fromkeys(BYTES, BYTES_HINT) | {
    SPEED: "a step takes compute plus all-reduce. Each of n nodes sends 2 (n-1)/n of 100 MB, at "
           "nine tenths of 10 Gbit/s, which is 1.25 GB/s",
    SENT: "a ring sends (N-1)/N of the bytes, twice; an fp32 number has 4 bytes"}


def checks(file):
    """Yield (description, passed, hint), after printing a table of all answers."""
    answers, = on_ranks(file, lambda _: load_exercise(file).PREDICTION, 1, init_group=False)
    missing = [name for name in FORMULAS if not isinstance(answers.get(name), (int, float))]
    yield "all five numbers are typed in", not missing, (
        f"{len(missing)} of the 5 values are not numbers; answers are shown once all five are")

    print(f"  {'':36} {'you':>15} {'computed':>15}")
    for name, value in FORMULAS.items():
        print(f"  {name:36} {answers[name]:15,.6g} {value:15,.6g}")
    print(f"  {RANKS} ranks have just sent, over the ring of exercise 2: "
          f"{on_ranks(file, bytes_sent, RANKS)[0]:,} bytes each")
    for name, value in FORMULAS.items():
        ratio = answers[name] / value
        yield f"{name}, within 5 %", abs(ratio - 1) <= 0.05, (
            f"your value is {ratio:.3g} times the formula's: {HINTS[name]}")


def bytes_sent(rank):
    """Return the bytes that a rank sends to sum fp32 gradients over the ring of exercise 2."""
    calls = record_calls()
    load_exercise(RING).ring_all_reduce(torch.zeros(SMALL))
    return sum(4 * elements for name, elements, _ in calls if name == "isend")
