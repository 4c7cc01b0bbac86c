"""Three cases for exercise 10, drawn by a seed, and the checks of a layout."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from runner import Checks

from cluster.plan.layouts import Plan, make_plan, rank
from cluster.plan.step import Cluster
from cluster.plan.transformer import Layout, Transformer
from workshop.gpus import Gpu, read_gpus

SPEED, ERROR = 0.8, 0.25  # at least this share of the best speed; at most this error of the seconds
GPUS = "a100", "h100", "h200", "mi300x"
LESSONS = (  # (layers, width), nodes, sequences per GPU, the kind that wins, one that does not
    (((24, 1536), (24, 2048), (36, 1792)), (8, 16, 32), (1, 2), "DDP", "FSDP"),
    (((32, 4096), (48, 4096), (40, 5120)), (4, 8, 16), (4, 8), "FSDP", "DDP"),
    (((48, 6144), (48, 7168), (64, 8192)), (32, 64), (1 / 4, 1 / 2),
     "ZeRO-1 + tensor + pipeline", "FSDP"))


@dataclass(frozen=True)
class Case:
    model: Transformer
    gpu: Gpu
    cluster: Cluster
    sequences: int

    def __str__(self):
        """Return the flags of cluster.plan."""
        sizes = "layers", "width", "heads", "context", "vocabulary"
        flags = " ".join(f"--{name} {getattr(self.model, name)}" for name in sizes)
        return (f"{flags} --gpu {self.gpu.name} --gpus {self.cluster.ranks} "
                f"--global-batch-tokens {self.sequences * self.model.context}")

    def rank(self) -> list[Plan]:
        """Return the best plan of each kind, best first."""
        return rank(self.model, self.gpu, self.cluster, self.sequences)

    def plan(self, data, shard, tensor, pipeline, micro_batch, recompute) -> Plan:
        """Return the prediction for a layout."""
        zero = 0 if shard == 1 else 1 if pipeline > 1 else 3
        layout = Layout(data, 1, tensor, pipeline, zero, data // shard if zero == 3 else 1,
                        micro_batch, self.sequences // (data * micro_batch),
                        checkpointing="full" if recompute else "none")
        return make_plan(self.model, layout, self.gpu, self.cluster)

    def problems(self, data, shard, tensor, pipeline, micro_batch) -> Iterator[str]:
        """Yield what does not divide evenly."""
        if data * tensor * pipeline != self.cluster.ranks:
            yield f"data x tensor x pipeline is {data * tensor * pipeline}, not the number of GPUs"
        if data % shard or (pipeline > 1 and shard != data):
            yield "shard has to divide data; in a pipeline it is data"
        if self.model.heads % tensor or self.cluster.gpus % tensor:
            yield "tensor has to divide the heads and the GPUs of a node"
        if self.model.layers % pipeline:
            yield "pipeline has to divide the layers"
        if self.sequences % (data * micro_batch):
            yield (f"data x micro_batch is {data * micro_batch}: it has to divide the "
                   f"{self.sequences} sequences; a sequence is on one data-parallel rank")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0


def draw(seed: int) -> list[Case]:
    generator = random.Random(seed)
    return [draw_case(generator, *lesson) for lesson in LESSONS]


def draw_case(generator, models, nodes, sequences, winner, loser):
    """Return a case in which `winner` is one of the best kinds of layout, and `loser` is not."""
    while True:
        layers, width = generator.choice(models)
        model = Transformer(layers, width, width // 128, generator.choice((2048, 4096)), 50_000)
        gpu = read_gpus()[generator.choice(GPUS)]
        cluster = Cluster(generator.choice(nodes), gpu.gpus_per_node, gpu.node_link, gpu.gpu_link)
        case = Case(model, gpu, cluster, int(cluster.ranks * generator.choice(sequences)))
        plans = case.rank()
        best = plans[0].tokens_per_second
        speeds = {plan.kind: plan.tokens_per_second for plan in plans if plan.fits != "no"}
        if speeds.get(winner, 0) >= 0.95 * best and speeds.get(loser, 0) < 0.75 * best:
            return case


def check_layout(number: int, case: Case, layout: tuple) -> Checks:
    """Check a row of LAYOUTS."""
    *sizes, recompute, seconds = layout
    are_whole = all(isinstance(size, int) and size > 0 for size in sizes)
    yield f"case {number}: numbers are typed in", are_whole and is_number(seconds), (
        "a row is data, shard, tensor, pipeline, micro_batch, recompute, seconds; the first five "
        "are whole numbers")
    problem = next(case.problems(*sizes), "")
    yield "  everything divides evenly", not problem, problem
    plan, best = case.plan(*sizes, recompute), case.rank()[0]
    memory = plan.memory
    yield f"  {plan.name} fits", plan.fits != "no", (
        f"memory: {memory.state / 2**30:.0f} GiB of state + "
        f"{(memory.activations + memory.work) / 2**30:.0f} of activations and temporary, with "
        f"fragments {memory.reserved / 2**30:.0f} > {plan.gpu.memory / 2**30:.0f} GiB")
    speed = plan.tokens_per_second / best.tokens_per_second
    yield f"  its speed is {speed:.0%} of the best", speed >= SPEED, (
        f"another layout is over a fifth faster. This one is limited by {plan.limit}")
    step = plan.step
    ratio = seconds / step.seconds
    yield "  its seconds, within a quarter", abs(ratio - 1) <= ERROR, (
        f"your value is {ratio:.3g} times the computed one, which is {step.compute:.2g} s of "
        f"computation, {step.tensor:.2g} of tensor parallelism's messages, {step.data_exposed:.2g} "
        f"of waiting for parameters and gradients, {step.bubble:.2g} of an idle pipeline, and the "
        "optimizer")
