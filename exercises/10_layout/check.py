"""Checks for exercise 10: a layout for each of three cases, which a seed draws."""

import random

from runner import load_exercise, on_ranks

from cluster.plan.layouts import layouts, make_plan, rank
from cluster.plan.step import Cluster
from cluster.plan.transformer import Transformer
from workshop.gpus import read_gpus

SPEED, ERROR = 0.8, 0.25  # at least this share of the best speed; at most this error of the seconds
KINDS = {"DDP", "FSDP", "HSDP", "FSDP + tensor", "ZeRO-1 + pipeline", "ZeRO-1 + tensor + pipeline"}
GPUS = "a100", "h100", "h200", "mi300x"
LESSONS = (  # (layers, width), nodes, sequences per GPU, the kind that wins, one that does not
    (((24, 1536), (24, 2048), (36, 1792)), (8, 16, 32), (1, 2), "DDP", "FSDP"),
    (((32, 4096), (48, 4096), (40, 5120)), (4, 8, 16), (4, 8), "FSDP", "DDP"),
    (((48, 6144), (48, 7168), (64, 8192)), (32, 64), (1 / 4, 1 / 2),
     "ZeRO-1 + tensor + pipeline", "FSDP"))


def checks(file):
    def run_exercise(rank):
        exercise = load_exercise(file)
        return exercise.SEED, exercise.LAYOUTS

    seed, rows = on_ranks(file, run_exercise, 1, backend=None)[0]
    yield "SEED is a whole number", isinstance(seed, int), (
        "replace None by any whole number, such as your birthday: it draws your three cases")
    generator = random.Random(seed)
    cases = [draw_case(generator, *lesson) for lesson in LESSONS]
    for number, case in enumerate(cases, 1):
        print(f"  case {number}, {case[-1]} sequences: {flags(*case)}")
    yield "LAYOUTS has three rows of seven values", [len(row) for row in rows] == 3 * [7], (
        "one row for each case")
    for number, (case, row) in enumerate(zip(cases, rows), 1):
        yield from check_layout(number, case, row)


def draw_case(generator, models, nodes, sequences, winner, loser):
    """Return (model, GPU, cluster, sequences), for which only `winner` is among the best kinds."""
    while True:
        layers, width = generator.choice(models)
        model = Transformer(layers, width, width // 128, generator.choice((2048, 4096)), 50_000)
        gpu = read_gpus()[generator.choice(GPUS)]
        cluster = Cluster(generator.choice(nodes), gpu.gpus_per_node, gpu.node_link, gpu.gpu_link)
        case = model, gpu, cluster, int(cluster.ranks * generator.choice(sequences))
        plans = rank_known(*case)
        best = plans[0].tokens_per_second
        speeds = {plan.kind: plan.tokens_per_second for plan in plans if plan.fits != "no"}
        if speeds.get(winner, 0) >= 0.95 * best and speeds.get(loser, 0) < 0.75 * best:
            return case


def rank_known(*case):
    """Return the best plan of each kind that the page teaches, best first."""
    return [plan for plan in rank(*case) if plan.kind in KINDS]


def flags(model, gpu, cluster, sequences):
    """Return a case as flags of cluster.plan."""
    sizes = "layers", "width", "heads", "context", "vocabulary"
    return (" ".join(f"--{name} {getattr(model, name)}" for name in sizes)
            + f" --gpu {gpu.name} --gpus {cluster.ranks}"
            f" --global-batch-tokens {sequences * model.context}")


def check_layout(number, case, row):
    """Check a row of LAYOUTS."""
    *sizes, recompute, seconds = row
    yield f"case {number}: numbers are typed in", all(
        isinstance(value, (int, float)) and value > 0 for value in (*sizes, seconds)), (
        "a row is data, shard, tensor, pipeline, micro_batch, recompute, seconds")
    data, shard, tensor, pipeline, micro_batch = sizes
    model, gpu, cluster, sequences = case
    layout = next((layout for layout in layouts(model, cluster.ranks, cluster.gpus, sequences)
                   if row_of(layout) == (*sizes, recompute) and layout.sequences == sequences),
                  None)
    yield "  everything divides evenly", layout is not None, (
        f"data x tensor x pipeline is {data * tensor * pipeline}, and has to be {cluster.ranks}; "
        f"shard, {shard}, is 1, a node's GPUs, or data; in a pipeline, or with tensor > 1, data. "
        f"tensor, {tensor}, has to divide the heads, {model.heads}, and a node's GPUs, "
        f"{gpu.gpus_per_node}; pipeline, {pipeline}, the layers, {model.layers}. data x "
        f"micro_batch is {data * micro_batch}: it has to divide the {sequences} sequences. tensor, "
        "pipeline, micro_batch are powers of two")
    plan = make_plan(model, layout, gpu, cluster)
    memory = plan.memory
    yield f"  {plan.name} fits", plan.fits != "no", (
        f"memory: {memory.state / 2**30:.0f} GiB of state + "
        f"{(memory.activations + memory.work) / 2**30:.0f} of activations and temporary, with "
        f"fragments {memory.reserved / 2**30:.0f} > {gpu.memory / 2**30:.0f} GiB")
    speed = plan.tokens_per_second / rank_known(*case)[0].tokens_per_second
    yield f"  its speed is {speed:.0%} of the best", speed >= SPEED, (
        f"another layout is over a fifth faster. This one is limited by {plan.limit}")
    step = plan.step
    ratio = seconds / step.seconds
    yield "  its seconds, within a quarter", abs(ratio - 1) <= ERROR, (
        f"your value is {ratio:.3g} times the computed one, which is {step.compute:.2g} s of "
        f"computation, {step.tensor:.2g} of tensor parallelism's messages, {step.data_exposed:.2g} "
        f"of waiting for parameters and gradients, {step.bubble:.2g} of an idle pipeline, and the "
        "optimizer")


def row_of(layout):
    """Return a layout as in LAYOUTS, without the seconds."""
    shard = layout.data // layout.replicas if layout.zero else 1
    return (layout.data, shard, layout.tensor, layout.pipeline, layout.micro_batch,
            layout.checkpointing == "full")
