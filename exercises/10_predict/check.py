"""What the grade of exercise 10 looks at: predictions, the repository's formulae, and bytes counted on real ranks."""

import math
import sys
from pathlib import Path

import torch
import torch._dynamo  # which optimizers import: once, before the ranks are forked
import torch.distributed as dist
from runner import PRINTED, NotRun, learner, on_ranks
from torch import nn
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[2] / "03_ddp"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "05_zero"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "02_horovod"))
import ring_allreduce
from cost_model import Cluster, step_seconds

from accounting import ROLES, formula, storages

RANKS, STAGES = 4, (1, 2, 3)
PARAMETERS = 1.5e9  # of the model in question
INPUTS, OUTPUTS = 99, 1000  # of the layer that is run
SMALL = (INPUTS + 1) * OUTPUTS  # its parameters
NODE = Cluster(nodes=1, gpus=4, node_link=1.25e9, gpu_link=300e9)
IMAGES, COMPUTE, GRADIENTS = 64, 0.25, 100e6  # of a GPU, in a step: images, seconds, bytes of gradients
SPEED, *BYTES, SENT = ("images a second on 2 nodes", *(f"GB a GPU, ZeRO stage {stage}" for stage in STAGES),
                       "bytes a rank sends in a step of DDP")
TOLERANCE = {SPEED: 0.1} | dict.fromkeys([*BYTES, SENT], 0.01)


def watch(file):
    """The learner's numbers; if all are there, what the formulae say and what is counted, and a table of them."""
    typed, = on_ranks(file, lambda _: getattr(learner(file), "PREDICTION", None), 1, meet=False)
    if not isinstance(typed, dict) or typed.keys() != TOLERANCE.keys():
        raise NotRun("PREDICTION has to be a dict with the five keys that it came with")
    missing = [name for name, value in typed.items() if isinstance(value, bool) or not isinstance(value, (int, float))
               or not math.isfinite(value)]
    if missing:
        return {"missing": missing}
    counted = on_ranks(file, on_rank, RANKS)[0]
    PRINTED.clear()
    computed, one_node = formulae()
    print(f"  {'':36} {'you':>15} {'computed':>15} {'counted':>15}")
    for name, value in typed.items():
        found = f"{counted[name]:,.6g}" if name in counted else "not run here"
        print(f"  {name:36} {value:15,.6g} {computed[name]:15,.6g} {found:>15}")
    print(f"  counted: on {RANKS} ranks with {SMALL:,} parameters; ZeRO's bytes times {PARAMETERS / SMALL:,.0f}")
    return {"missing": [], "typed": typed, "computed": computed, "counted": counted, "one node": one_node}


def formulae():
    """What the chapters' own functions say, and the throughput of one node."""
    def speed(nodes):
        cluster = Cluster(nodes, NODE.gpus, NODE.node_link, NODE.gpu_link)
        return cluster.ranks * IMAGES / step_seconds(COMPUTE, GRADIENTS, cluster, overlap=False)
    found = {SPEED: speed(2), SENT: 2 * (RANKS - 1) / RANKS * 4 * SMALL}
    for name, stage in zip(BYTES, STAGES):
        expected = formula(stage, RANKS, PARAMETERS, 0, width=2, gathered=2, master=4, moments=8, keeps_gradients=True)
        found[name] = sum(expected[role] for role in ROLES) / 1e9
    return found, speed(1)


def on_rank(rank):
    found = {name: held(stage, rank) * PARAMETERS / SMALL / 1e9 for name, stage in zip(BYTES, STAGES)}
    return found | {SENT: sent()}


def held(stage, rank):
    """The bytes of model state that a rank keeps of a layer in bf16 and Adam, after a step of ZeRO by hand."""
    mine = slice(rank * SMALL // RANKS, (rank + 1) * SMALL // RANKS)
    parameters = torch.randn(SMALL, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    weights, bias = parameters[:INPUTS * OUTPUTS].view(OUTPUTS, INPUTS), parameters[INPUTS * OUTPUTS:]
    linear(torch.randn(8, INPUTS).bfloat16(), weights, bias).float().square().mean().backward()
    mean = parameters.grad.float()
    dist.all_reduce(mean)
    gradient = (mean / RANKS).bfloat16()
    master = parameters.detach()[mine].float()  # in fp32, of this rank's share alone
    master.grad = gradient[mine].float()
    adam = torch.optim.Adam([master])
    adam.step()
    moments = [tensor for tensor in adam.state[master].values() if tensor.numel() > 1]
    if stage >= 2:
        gradient = gradient[mine].clone()
    if stage == 3:
        parameters = parameters.detach()[mine].clone()
    return sum(storages([parameters, gradient, master, *moments]).values())


def sent():
    """The bytes that a rank sends in a step of DDP whose all-reduce is the ring of chapter 2."""
    wire = ring_allreduce.Wire()

    def by_ring(_, bucket):
        ring_allreduce.ring(bucket.buffer(), wire)
        done = torch.futures.Future()
        done.set_result(bucket.buffer() / RANKS)
        return done
    ddp = DistributedDataParallel(nn.Linear(INPUTS, OUTPUTS))
    ddp.register_comm_hook(None, by_ring)
    ddp(torch.randn(8, INPUTS)).square().mean().backward()
    return wire.bytes


def points(facts):
    """(what, whether it is right, the hint if not), in the order of the questions."""
    yield "all five numbers are typed in", not facts["missing"], (
        f"{len(facts['missing'])} of five are no numbers yet; the answers are computed and shown when all are")
    for name, tolerance in TOLERANCE.items():
        typed, computed = facts["typed"][name], facts["computed"][name]
        known = mistakes(name, computed, facts["one node"])
        hint = next((why for number, why in known if abs(typed - number) <= 0.005 * number),
                    f"that is {typed / computed:.3g} times what the formula says: {GENERAL[name]}")
        yield f"{name}, within {tolerance:.0%}", abs(typed - computed) <= tolerance * computed, hint


GENERAL = dict.fromkeys(BYTES, "16 bytes a parameter: which of 2, 2, 4 and 8 does this stage divide by the GPUs?") | {
    SPEED: "a step is as long as compute and all-reduce together; how many bytes leave a node, and at which rate?",
    SENT: "a ring sends all bytes but one part in N, and does so twice"}


def mistakes(name, computed, one_node):
    """[(the number that a typical mistake gives, what it shows)]."""
    if name == SPEED:
        images, sent, rate = 2 * NODE.gpus * IMAGES, GRADIENTS, 0.9 * NODE.node_link
        return [
            (2 * one_node, "exactly twice one node: but now each step has to send gradients over the link"),
            (images / COMPUTE, "eight times one GPU: that takes a network without end, and GPUs that never wait"),
            (one_node, "no more than one node has"), (computed / 2, "that is one node's half of it"),
            (images / (COMPUTE + sent / 2 / rate), "the gradients go twice: to be summed, and to hand out the sums"),
            (images / (COMPUTE + 8 * sent / rate), "10 Gbit/s are 1.25 GB/s: bits, not bytes")]
    if name == SENT:
        whole = 4 * SMALL
        return [
            (computed / 2, "half of it: a ring all-reduce goes round twice, to sum the parts and to hand out the sums"),
            (2 * whole, "nearly: 2 (N-1)/N, as no rank sends the part that it has summed to itself"),
            (whole, "that is the size of the gradients, and not what an all-reduce of them sends"),
            (RANKS * computed, f"that is what all {RANKS} ranks send together"),
            (computed / 4, "these are elements: an fp32 has 4 bytes"), (computed / 4 * 2, "an fp32 has 4 bytes, not 2"),
            ((RANKS - 1) * whole, "that is everyone to everyone: a ring sends less")]
    others = [(stage, other) for stage, other in zip(STAGES, BYTES) if other != name]
    stages = [(formulae()[0][other], f"that is stage {stage}'s") for stage, other in others]
    return [
        (computed * 1e9 / 2**30, "these are GiB, 2**30 bytes: memory is sold in GB here, 10**9 bytes"),
        (16 * PARAMETERS / 1e9, "that is without ZeRO, each GPU holds everything; or all GPUs together at stage 3"),
        (computed * RANKS, f"that is what all {RANKS} GPUs hold together"),
        (computed * 1e9, "these are bytes: a GB has 10**9"),
        *stages,
        (4 * PARAMETERS / RANKS / 1e9, "4 bytes a parameter: with bf16 and Adam there are 16, and not only parameters"),
        (2 * PARAMETERS / RANKS / 1e9, "2 bytes a parameter: with bf16 and Adam there are 16, and not only parameters"),
        (2 * PARAMETERS / 1e9, "2 bytes a parameter are the parameters alone")]
