"""What the grade of exercise 10 looks at: predictions, formulas, and bytes on real ranks."""

from pathlib import Path

import torch
from runner import counted, learner, on_ranks

RING = Path(__file__).resolve().parents[1] / "2_ring" / "solution.py"
RANKS, PARAMETERS, SMALL = 4, 1.5e9, 100_000
SPEED = "images a second on 2 nodes"
BYTES = [f"GB a GPU, ZeRO stage {stage}" for stage in (1, 2, 3)]
SENT = "bytes a rank sends in a step of DDP"
FORMULAS = {
    # two nodes of 4 GPUs, 64 images each; a node sends 2 (n-1)/n of 100 MB
    SPEED: 8 * 64 / (0.25 + 100e6 / (0.9 * 1.25e9)),
    BYTES[0]: PARAMETERS * (2 + 2 + 12 / RANKS) / 1e9,
    BYTES[1]: PARAMETERS * (2 + 14 / RANKS) / 1e9,
    BYTES[2]: PARAMETERS * 16 / RANKS / 1e9,
    SENT: 2 * (RANKS - 1) / RANKS * 4 * SMALL}
BYTES_HINT = ("16 bytes a parameter: which of 2, 2, 4 and 8 does this stage divide by the GPUs? A "
              "GB is 10**9 bytes here")
HINTS = dict.fromkeys(BYTES, BYTES_HINT) | {
    SPEED: "a step is as long as compute and all-reduce together. Between n nodes each sends "
           "2 (n-1)/n of 100 MB, at nine tenths of 10 Gbit/s, which are 1.25 GB/s",
    SENT: "a ring sends all bytes but one part in N, and does so twice; an fp32 has 4 bytes"}


def points(file):
    """Yield (what, whether it is right, the hint if not), after a table of all."""
    answers, = on_ranks(file, lambda _: learner(file).PREDICTION, 1, meet=False)
    missing = [name for name in FORMULAS if not isinstance(answers.get(name), (int, float))]
    yield "all five numbers are typed in", not missing, (
        f"{len(missing)} of five are no numbers yet; the answers are shown when all are")

    print(f"  {'':36} {'you':>15} {'computed':>15}")
    for name, value in FORMULAS.items():
        print(f"  {name:36} {answers[name]:15,.6g} {value:15,.6g}")
    print(f"  {RANKS} ranks have just sent, over exercise 2's ring: "
          f"{on_ranks(file, bytes_sent, RANKS)[0]:,} bytes each")
    for name, value in FORMULAS.items():
        ratio = answers[name] / value
        yield f"{name}, within 5 %", abs(ratio - 1) <= 0.05, (
            f"that is {ratio:.3g} times what the formula says: {HINTS[name]}")


def bytes_sent(rank):
    """Return what a rank sends to sum up gradients in fp32 over exercise 2's ring."""
    calls = counted()
    learner(RING).ring_all_reduce(torch.zeros(SMALL))
    return sum(4 * elements for name, elements, _ in calls if name == "isend")
