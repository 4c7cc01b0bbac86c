"""What the grade of exercise 10 looks at: predictions, formulas, and bytes on real ranks."""

from pathlib import Path

import torch
import torch._dynamo  # which optimizers import: once, before the ranks are forked
from runner import NotRun, counted, learner, on_ranks
from torch.nn.functional import linear

RING = Path(__file__).resolve().parents[1] / "2_ring" / "solution.py"
RANKS, PARAMETERS = 4, 1.5e9
INPUTS, OUTPUTS = 100, 1000  # of the layer that is run
SMALL = INPUTS * OUTPUTS  # its parameters
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
TOLERANCE = {SPEED: 0.1} | dict.fromkeys([*BYTES, SENT], 0.01)
BYTES_HINT = ("16 bytes a parameter: which of 2, 2, 4 and 8 does this stage divide by the GPUs? A "
              "GB is 10**9 bytes here")
HINTS = dict.fromkeys(BYTES, BYTES_HINT) | {
    SPEED: "a step is as long as compute and all-reduce together. Between n nodes each sends "
           "2 (n-1)/n of 100 MB, at nine tenths of 10 Gbit/s, which are 1.25 GB/s",
    SENT: "a ring sends all bytes but one part in N, and does so twice; an fp32 has 4 bytes"}


def points(file):
    """Yield (what, whether it is right, the hint if not), after a table of all."""
    answers, = on_ranks(file, lambda _: learner(file).PREDICTION, 1, meet=False)
    if not isinstance(answers, dict) or answers.keys() != FORMULAS.keys():
        raise NotRun("PREDICTION has to be a dict with the five keys that it came with")
    missing = [name for name, value in answers.items() if not isinstance(value, (int, float))]
    yield "all five numbers are typed in", not missing, (
        f"{len(missing)} of five are no numbers yet; the answers are shown when all are")

    measured = on_ranks(file, on_rank, RANKS)[0]
    print(f"  {'':36} {'you':>15} {'computed':>15} {'counted':>15}")
    for name, value in answers.items():
        count = f"{measured[name]:,.6g}" if name in measured else "not run here"
        print(f"  {name:36} {value:15,.6g} {FORMULAS[name]:15,.6g} {count:>15}")
    print(f"  counted: on {RANKS} ranks with {SMALL:,} parameters; "
          f"ZeRO's bytes times {PARAMETERS / SMALL:,.0f}")
    for name, tolerance in TOLERANCE.items():
        ratio = answers[name] / FORMULAS[name]
        yield f"{name}, within {tolerance:.0%}", abs(ratio - 1) <= tolerance, (
            f"that is {ratio:.3g} times what the formula says: {HINTS[name]}")


def on_rank(rank):
    """Return what a rank keeps and sends in a step of a layer in bf16, sharded by hand."""
    calls = counted()
    mine = slice(rank * SMALL // RANKS, (rank + 1) * SMALL // RANKS)
    generator = torch.Generator().manual_seed(0)
    parameters = torch.randn(SMALL, generator=generator).bfloat16().requires_grad_()
    outputs = linear(torch.randn(8, INPUTS).bfloat16(), parameters.view(OUTPUTS, INPUTS))
    outputs.float().square().mean().backward()
    total = parameters.grad.float()
    learner(RING).ring_all_reduce(total)  # exercise 2's
    gradient = (total / RANKS).bfloat16()

    master = parameters.detach()[mine].float()  # in fp32, of this rank's share alone
    master.grad = gradient[mine].float()
    adam = torch.optim.Adam([master])
    adam.step()
    state = [master, *(tensor for tensor in adam.state[master].values() if tensor.numel() > 1)]
    own_parameters, own_gradient = parameters.detach()[mine].clone(), gradient[mine].clone()
    stages = [(parameters, gradient), (parameters, own_gradient), (own_parameters, own_gradient)]
    counts = {SENT: sum(4 * elements for name, elements, _ in calls if name == "isend")}
    for name, tensors in zip(BYTES, stages):
        size = sum(tensor.untyped_storage().nbytes() for tensor in (*tensors, *state))
        counts[name] = size * PARAMETERS / SMALL / 1e9
    return counts
