"""What thousands of GPUs lose to communication, stragglers and failures, on paper.

    python at_scale.py                      # the assumptions, and a row for each number of GPUs
    python at_scale.py 8 1000 10000         # of these numbers

    from at_scale import H100, MODEL_7B, predict
    predict(10000, MODEL_7B, H100)["useful"]

Beside cost_model.py, whose stragglers and buckets it uses: an all-reduce in two levels, within the
node and between nodes, and failures, which cost_model.py does not know. Times are seconds, sizes
bytes. What it leaves out stands in AT_SCALE.md.
"""

import argparse
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from cost_model import CENTRAL, Constants, bucket_sizes, slowest

HOUR = 3600


# --- what is assumed ---

class Assumption(NamedTuple):
    name: str
    value: float
    unit: str
    source: str


LLAMA = "Llama 3 405B, 2407.21783"
ASSUMPTIONS = (
    Assumption("GPUs of a node", 8, "", "DGX H100"),
    Assumption("rate of a GPU's links in the node", 450, "GB/s", "DGX H100: NVLink, 18 x 25 GB/s"),
    Assumption("rate of a node's network cards", 400, "GB/s", "DGX H100: 8 x 400 Gbit/s"),
    Assumption("usable share of these rates", CENTRAL.usable, "", "assumed, as in cost_model.py"),
    Assumption("a message in the node", 1e6 * CENTRAL.hop, "us", "assumed, as in cost_model.py"),
    Assumption("a message between nodes", 1e6 * CENTRAL.level / 2, "us",
               "half a level of cost_model.py: two messages each"),
    Assumption("scatter of a GPU's step", round(100 * CENTRAL.jitter, 2), "%",
               "fitted to 8 V100: cost_model.py"),
    Assumption("backward's part of computing", round(100 * CENTRAL.backward), "%",
               "assumed, as in cost_model.py"),
    Assumption("parameters", 7, "billion", "the network whose checkpoints PyTorch timed, below"),
    Assumption("a gradient", 2, "bytes", "assumed: bfloat16"),
    Assumption("computing, a token and parameter", 6, "FLOP", "Kaplan et al., 2001.08361"),
    Assumption("computing rate of a GPU", 400, "TFLOP/s", f"{LLAMA}, table 4: 380 to 430"),
    Assumption("most tokens of a GPU in a step", 8192, "tokens", f"one sequence of {LLAMA}"),
    Assumption("most tokens of all in a step", 2**24, "tokens", f"{LLAMA}, table 4"),
    Assumption("time between failures of a GPU", round(54 * 24 * 16384 / 419), "h",
               f"{LLAMA}, 3.3.4: 419 in 54 days on 16,384"),
    Assumption("a checkpoint that all wait for", 148.8, "s",
               "7B, pytorch.org/blog/reducing-checkpointing-times"),
    Assumption("one that is written meanwhile", 6.3, "s", "the same page: what all still wait"),
    Assumption("noticing, restart, reading", 600, "s", "assumed: as long as NCCL's time-out"),
)
GIVEN = {one.name: one.value for one in ASSUMPTIONS}


@dataclass(frozen=True)
class Link:
    """alpha: seconds that any message takes; beta: seconds a byte, in one direction."""
    alpha: float
    beta: float


@dataclass(frozen=True)
class Fabric:
    """What connects GPUs: `gpus` in a node.

    inside: what a GPU sends to another of its node. between: what a node sends, all its network
    cards together. algorithm: between nodes, "tree" (halving and doubling) or "ring".
    """
    gpus: int
    inside: Link
    between: Link
    algorithm: str = "tree"


@dataclass(frozen=True)
class Job:
    """What is trained, and what happens to it.

    One GPU computes a step of b samples (or tokens) in start + b / rate. Each takes `batch` of them
    as long as all together take at most `largest_batch`; beyond, less: as in cost_model.plan.
    checkpoint: seconds that all wait for one; restart: from a failure until training goes on;
    gpu_mtbf: mean time between failures of a single GPU and its share of everything else.
    """
    gradient_bytes: float
    rate: float
    batch: int
    largest_batch: int
    checkpoint: float
    restart: float
    gpu_mtbf: float
    start: float = 0.0
    library: str = "DDP"


def links_of(constants: Constants = CENTRAL) -> Fabric:
    """The fabric of the assumptions; `constants` has what messages cost, and the usable share."""
    gpu_rate = 1e9 * GIVEN["rate of a GPU's links in the node"] * constants.usable
    node_rate = 1e9 * GIVEN["rate of a node's network cards"] * constants.usable
    return Fabric(GIVEN["GPUs of a node"], Link(constants.hop, 1 / gpu_rate),
                  Link(constants.level / 2, 1 / node_rate))


H100 = links_of()
MODEL_7B = Job(
    gradient_bytes=1e9 * GIVEN["parameters"] * GIVEN["a gradient"],
    rate=1e12 * GIVEN["computing rate of a GPU"]
    / (GIVEN["computing, a token and parameter"] * 1e9 * GIVEN["parameters"]),
    batch=GIVEN["most tokens of a GPU in a step"],
    largest_batch=GIVEN["most tokens of all in a step"],
    checkpoint=GIVEN["a checkpoint that all wait for"],
    restart=GIVEN["noticing, restart, reading"],
    gpu_mtbf=HOUR * GIVEN["time between failures of a GPU"])


# --- communication ---

def costs(members: int, algorithm: str) -> tuple[float, float]:
    """(messages one after the other, bytes through a link for each byte) of an all-reduce.

    Both pass 2 (n-1)/n of the bytes. Ring: in 2 (n-1) messages (Patarasuk and Yuan, J. Parallel
    Distrib. Comput. 69 (2009) 117). Tree: halving, then doubling, in 2 log2 n (Thakur et al., doi
    10.1177/1094342005051521).
    """
    messages = 2 * (members - 1) if algorithm == "ring" else 2 * math.log2(members)
    return messages, 2 * (members - 1) / members


def all_reduce_seconds(size: float, gpus: int, fabric: Fabric) -> float:
    """An all-reduce of `size` bytes in two levels, one after the other.

    The GPUs of a node reduce and scatter: each has the sum of a part. Then the parts are
    all-reduced between nodes, all at the same time, so that the node's cards share the bytes; then
    the node gathers (Mikami et al., 1811.05233). The first and the last are together a ring's
    all-reduce in the node. Raises ValueError for a number of GPUs that does not fill the nodes.
    """
    here = min(gpus, fabric.gpus)
    if gpus < 1 or gpus % here:
        raise ValueError(f"{gpus} GPUs do not fill nodes of {fabric.gpus}")
    inside, between = costs(here, "ring"), costs(gpus // here, fabric.algorithm)
    return (inside[0] * fabric.inside.alpha + inside[1] * size * fabric.inside.beta
            + between[0] * fabric.between.alpha + between[1] * size * fabric.between.beta)


def fit_link(rows: Iterable[Mapping], algorithm: str = "ring") -> Link:
    """alpha and beta of measured all-reduces: rows of nodes, bytes and seconds, one rank a node.

    Least squares of the relative errors, so that a small message counts as much as a large one;
    alpha is 0 where it would be negative. Raises ValueError for rows from which no line follows.
    """
    rows = [row for row in rows if row["nodes"] > 1]
    table = np.array([[row["seconds"], *costs(row["nodes"], algorithm)] for row in rows])
    if len({row["bytes"] for row in rows}) < 2:
        raise ValueError("alpha and beta want all-reduces of two sizes or more, on several nodes")
    seconds, messages, factor = table.T
    moved = factor * np.array([row["bytes"] for row in rows])
    shares = np.stack([messages / seconds, moved / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(shares, np.ones(len(rows)), rcond=None)[0]
    if beta <= 0:
        raise ValueError(f"no line through these: alpha {alpha:.2g} s, beta {beta:.2g} s a byte")
    if alpha < 0:
        alpha, beta = 0.0, shares[:, 1].sum() / (shares[:, 1] ** 2).sum()
    return Link(float(alpha), float(beta))


# --- a step ---

def step_parts(compute: float, gpus: int, job: Job, fabric: Fabric,
               constants: Constants = CENTRAL) -> tuple[float, float]:
    """(seconds until the slowest rank has computed, seconds of the step).

    As cost_model.step_seconds has it: backward fills the buckets at an even pace, and each is
    all-reduced when it is full and the one before is through.
    """
    late = compute * (1 + constants.jitter * slowest(gpus))
    filled, free = late * (1 - constants.backward), 0.0
    for size in bucket_sizes(job.gradient_bytes, job.library):
        filled += late * constants.backward * size / job.gradient_bytes
        free = max(filled, free) + all_reduce_seconds(size, gpus, fabric)
    return late, max(late, free)


# --- failures ---

def young(checkpoint: float, mtbf: float) -> float:
    """Seconds of work between checkpoints: Young, doi 10.1145/361147.361115 (1974)."""
    return math.sqrt(2 * checkpoint * mtbf)


def daly(checkpoint: float, mtbf: float) -> float:
    """The same to a higher order: Daly, doi 10.1016/j.future.2004.11.016 (2006)."""
    if checkpoint >= 2 * mtbf:
        return mtbf
    part = checkpoint / (2 * mtbf)
    return young(checkpoint, mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint


def time_shares(interval: float, checkpoint: float, restart: float, mtbf: float) -> dict:
    """How the time divides, in shares of 1, where failures come by chance (a Poisson process).

    Work of `interval` and its checkpoint take M exp(R/M) (exp((interval + checkpoint)/M) - 1) in
    the mean, M the time between failures and R the restart (Daly, the same). Restarts fail, too.
    """
    whole = mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf)
    shares = {"goodput": interval / whole, "checkpoints": checkpoint / whole,
              "restarts": -math.expm1(-restart / mtbf)}
    return shares | {"lost work": 1 - sum(shares.values())}


# --- all of it ---

def predict(gpus: int, job: Job, fabric: Fabric, constants: Constants = CENTRAL) -> dict:
    """A row: what a step on so many GPUs takes, and where the GPUs' time goes.

    Seconds: all_reduce (of all gradients, one bucket after the other), step, mtbf, interval
    (Daly's). efficiency: of a step, the share that computes; goodput: of the time, the share in
    steps that count; useful is their product. stragglers, communication, checkpoints, lost work and
    restarts are the rest of 1; failures are the last three.
    """
    batch = min(job.batch, job.largest_batch // gpus)
    if batch == 0:
        raise ValueError(f"{gpus} GPUs: none has anything to compute")
    compute = job.start + batch / job.rate
    late, step = step_parts(compute, gpus, job, fabric, constants)
    mtbf = job.gpu_mtbf / gpus
    interval = daly(job.checkpoint, mtbf)
    shares = time_shares(interval, job.checkpoint, job.restart, mtbf)
    goodput = shares.pop("goodput")
    buckets = bucket_sizes(job.gradient_bytes, job.library)
    return {"gpus": gpus, "batch": batch, "step": step,
            "all_reduce": sum(all_reduce_seconds(size, gpus, fabric) for size in buckets),
            "efficiency": compute / step, "mtbf": mtbf, "interval": interval, "goodput": goodput,
            "useful": goodput * compute / step, "stragglers": goodput * (late - compute) / step,
            "communication": goodput * (step - late) / step, **shares, "failures": 1 - goodput}


COUNTS = (8, 1024, 4096, 10000)
COLUMNS = (("GPUs", 7, "{gpus:,}"), ("tokens", 8, "{batch:,}"), ("step", 9, "{step:.3f} s"),
           ("all-reduce", 12, "{all_reduce:.3f} s"), ("between failures", 18, "{hours:,.1f} h"),
           ("checkpoint every", 18, "{minutes:,.0f} min"), ("useful", 8, "{useful:.1%}"),
           ("communication", 15, "{communication:.1%}"), ("stragglers", 12, "{stragglers:.1%}"),
           ("failures", 10, "{failures:.1%}"))


def assumed() -> str:
    """The assumptions as a table."""
    return "\n".join(f"{one.name:34} {one.value:>12,.10g} {one.unit:8} {one.source}"
                     for one in ASSUMPTIONS)


def table(counts: Iterable[int] = COUNTS, job: Job = MODEL_7B, fabric: Fabric = H100) -> str:
    """A row for each number of GPUs; shares are of the GPUs' time."""
    lines = ["".join(f"{name:>{width}}" for name, width, _ in COLUMNS)]
    for gpus in counts:
        row = predict(gpus, job, fabric)
        row |= {"hours": row["mtbf"] / HOUR, "minutes": row["interval"] / 60}
        lines.append("".join(f"{text.format(**row):>{width}}" for _, width, text in COLUMNS))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    parser.add_argument("gpus", nargs="*", type=int, default=COUNTS, help="numbers of GPUs")
    counts = parser.parse_args().gpus
    if 0 in counts:
        parser.error("0 GPUs compute nothing")
    try:
        rows = table(counts)
    except ValueError as problem:
        parser.error(str(problem))
    print(assumed(), rows, sep="\n\n")


if __name__ == "__main__":
    main()
