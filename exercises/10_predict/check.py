"""What the grade of exercise 10 looks at: predictions, the repository's formulae, and bytes counted on real ranks."""

import math
import sys
from pathlib import Path

import torch
import torch._dynamo  # which optimizers import: once, before the ranks are forked
from runner import NotRun, learner, on_ranks
from torch.nn.functional import linear

sys.path += [str(Path(__file__).resolve().parents[2] / chapter) for chapter in ("02_horovod/pytorch", "03_ddp", "05_zero")]
import ring_allreduce
from cost_model import Cluster, step_seconds

from accounting import ROLES, formula, storages

RANKS, STAGES = 4, (1, 2, 3)
PARAMETERS = 1.5e9  # of the model in question
INPUTS, OUTPUTS = 100, 1000  # of the layer that is run
SMALL = INPUTS * OUTPUTS  # its parameters
SPEED, *BYTES, SENT = ("images a second on 2 nodes", *(f"GB a GPU, ZeRO stage {stage}" for stage in STAGES),
                       "bytes a rank sends in a step of DDP")
TOLERANCE = {SPEED: 0.1} | dict.fromkeys([*BYTES, SENT], 0.01)
HINTS = dict.fromkeys(BYTES, "16 bytes a parameter: which of 2, 2, 4 and 8 does this stage divide by the GPUs? A GB is "
                             "10**9 bytes here") | {
    SPEED: "a step is as long as compute and all-reduce together. Between n nodes each sends 2 (n-1)/n of 100 MB, at "
           "nine tenths of 10 Gbit/s, which are 1.25 GB/s",
    SENT: "a ring sends all bytes but one part in N, and does so twice; an fp32 has 4 bytes"}


def points(file):
    """(what, whether it is right, the hint if not), in the order of the questions; before them a table of all."""
    typed, = on_ranks(file, lambda _: getattr(learner(file), "PREDICTION", None), 1, meet=False)
    if not isinstance(typed, dict) or typed.keys() != TOLERANCE.keys():
        raise NotRun("PREDICTION has to be a dict with the five keys that it came with")
    missing = [name for name, value in typed.items() if not isinstance(value, (int, float)) or not math.isfinite(value)]
    yield "all five numbers are typed in", not missing, (
        f"{len(missing)} of five are no numbers yet; the answers are computed and shown when all are")
    computed, counted = formulae(), on_ranks(file, on_rank, RANKS)[0]
    print(f"  {'':36} {'you':>15} {'computed':>15} {'counted':>15}")
    for name, value in typed.items():
        found = f"{counted[name]:,.6g}" if name in counted else "not run here"
        print(f"  {name:36} {value:15,.6g} {computed[name]:15,.6g} {found:>15}")
    print(f"  counted: on {RANKS} ranks with {SMALL:,} parameters; ZeRO's bytes times {PARAMETERS / SMALL:,.0f}")
    for name, tolerance in TOLERANCE.items():
        ratio = typed[name] / computed[name]
        yield f"{name}, within {tolerance:.0%}", abs(ratio - 1) <= tolerance, (
            f"that is {ratio:.3g} times what the formula says: {HINTS[name]}")


def formulae():
    """What the chapters' own functions say."""
    cluster = Cluster(nodes=2, gpus=4, node_link=1.25e9, gpu_link=300e9)
    found = {SPEED: cluster.ranks * 64 / step_seconds(0.25, 100e6, cluster, overlap=False),
             SENT: 2 * (RANKS - 1) / RANKS * 4 * SMALL}
    for name, stage in zip(BYTES, STAGES):
        expected = formula(stage, RANKS, PARAMETERS, 0, width=2, gathered=2, master=4, moments=8, keeps_gradients=True)
        found[name] = sum(expected[role] for role in ROLES) / 1e9
    return found


def on_rank(rank):
    """What a rank keeps and sends in a step of a layer in bf16 with Adam, sharded by hand, with chapter 2's ring."""
    mine = slice(rank * SMALL // RANKS, (rank + 1) * SMALL // RANKS)
    parameters = torch.randn(SMALL, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    linear(torch.randn(8, INPUTS).bfloat16(), parameters.view(OUTPUTS, INPUTS)).float().square().mean().backward()
    mean, wire = parameters.grad.float(), ring_allreduce.Wire()
    ring_allreduce.ring(mean, wire)
    gradient = (mean / RANKS).bfloat16()
    master = parameters.detach()[mine].float()  # in fp32, of this rank's share alone
    master.grad = gradient[mine].float()
    adam = torch.optim.Adam([master])
    adam.step()
    moments = [tensor for tensor in adam.state[master].values() if tensor.numel() > 1]
    shares = parameters.detach()[mine].clone(), gradient[mine].clone()
    found = {SENT: wire.bytes}
    for name, kept in zip(BYTES, [(parameters, gradient), (parameters, shares[1]), shares]):
        found[name] = sum(storages([*kept, master, *moments]).values()) * PARAMETERS / SMALL / 1e9
    return found
