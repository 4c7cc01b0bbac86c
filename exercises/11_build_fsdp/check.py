"""Checks for exercise 11: fully sharded data parallelism."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import slow_link
import torch
import torch._dynamo  # imported once for all ranks, because optimizers need it
from runner import NotRun, flatten, is_close, load_exercise, on_ranks
from torch import nn

RANKS, LAYERS, STEPS, LR = 3, 3, 3, 0.1
WIDTH = 3  # of the small network; blocks have 8 width^2 + 5 width parameters
TIMED_RANKS, TIMED_LAYERS, TIMED_WIDTH, TIMED_BATCH = 2, 6, 128, 2048
PRETENDED_RANKS = 8
TOP = Path(__file__).resolve().parents[2]


def checks(file):
    yield from check_shard(file)
    scale = None
    for prefetch in False, True:
        yield from check_training(file, prefetch)
        recorded = on_ranks(file, lambda rank, prefetch=prefetch: time_steps(file, prefetch),
                            TIMED_RANKS, "slow_link")[0]
        scale = scale or recorded.seconds / slow_link.CHARACTERS
        slow_link.draw_step(f"prefetch={prefetch}", recorded, scale)
    print("  (F forward, B forward again and backward, . waiting, g all-gather, r reduce-scatter)")
    yield from check_footprint(file)


def build(file, layers, width):
    """Return plain blocks with the same weights on all ranks, and the learner's sharded copies."""
    exercise = load_exercise(file)
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        built.append([module.double() for module in exercise.build_blocks(layers, width)])
    modules, to_shard = built
    return exercise, modules, [exercise.ShardedBlock(module) for module in to_shard]


def check_shard(file):
    def run_exercise(rank):
        _, modules, blocks = build(file, LAYERS, WIDTH)
        whole = flatten(modules[0].parameters())
        shard = blocks[0].shard
        is_own = is_close(shard.detach(), whole.chunk(RANKS)[rank])
        return is_own, isinstance(shard, nn.Parameter), shard.untyped_storage().nbytes()

    results = on_ranks(file, run_exercise, RANKS)
    yield "self.shard has rank r's part of the parameters", all(
        is_own and is_parameter for is_own, is_parameter, _ in results), (
        "it is an nn.Parameter with the r-th of N equal parts of the vector of all parameters")
    size, expected = results[0][2], 8 * (8 * WIDTH**2 + 5 * WIDTH) // RANKS
    yield f"it takes {expected} bytes", size == expected, (
        f"it takes {size} bytes: a part is a view, which keeps the whole vector alive, until you "
        "clone() it")


def check_training(file, prefetch):
    def run_exercise(rank):
        """Return, for each step, shards, expected shards, and when what was gathered."""
        exercise, modules, blocks = build(file, LAYERS, WIDTH)
        sharded = torch.optim.SGD([block.shard for block in blocks], LR, momentum=0.9)
        plain_model = nn.Sequential(*modules)
        plain = torch.optim.SGD(plain_model.parameters(), LR, momentum=0.9)
        computing = []  # at each forward of a block: all-gathers issued, whole blocks, waits

        def before_forward(*_):
            kinds = [transfer.kind for transfer in slow_link.step.transfers]
            whole = sum(len(flatten(block.module.parameters())) > 0 for block in blocks)
            computing.append((kinds.count("all_gather"), whole, len(slow_link.step.waits)))

        for block in blocks:
            block.module.register_forward_pre_hook(before_forward)
        results = []
        for _ in range(STEPS):
            batches = torch.randn(RANKS, 6, WIDTH, dtype=torch.float64)
            plain.zero_grad()
            plain_model(batches.flatten(0, 1)).square().mean().backward()
            plain.step()
            computing.clear()
            recorded = slow_link.record_step(lambda step, batch=batches[rank]: exercise.train_step(
                blocks, sharded, batch, prefetch))
            kinds = [transfer.kind for transfer in recorded.transfers]
            expected = [flatten(module.parameters()).chunk(RANKS)[rank] for module in modules]
            results.append({
                "right": all(map(is_close, [block.shard.detach() for block in blocks], expected)),
                "computing": list(computing), "kinds": kinds})
        return results

    results = on_ranks(file, run_exercise, RANKS, "slow_link")
    name = f"prefetch={prefetch}"
    yield f"{name}: {STEPS} steps are those of one rank", all(
        step["right"] for steps in results for step in steps), (
        "each rank's shard of the gradient is the sum over the ranks, divided once by their "
        "number, after the wait. Every block hands tensor.grad to the one before it")
    first = results[0][0]
    gathered, whole, waits = zip(*first["computing"])
    yield f"{name}: one block is whole when it computes", set(whole) == {1}, (
        f"{max(whole)} blocks have their parameters at the same time: drop() a block as soon as it "
        "has computed")
    counts = {kind: first["kinds"].count(kind) for kind in ("all_gather", "reduce_scatter")}
    yield f"{name}: two all-gathers and one reduce-scatter per block", counts == {
        "all_gather": 2 * LAYERS, "reduce_scatter": LAYERS} and (
        len(first["kinds"]) == 3 * LAYERS), (
        f"{LAYERS} blocks call {' '.join(first['kinds'])}; expected in all {2 * LAYERS} "
        f"all_gather and {LAYERS} reduce_scatter")
    ahead = 2 if prefetch else 1
    expected = [passes + min(number + ahead, LAYERS)
                for passes in (0, LAYERS) for number in range(LAYERS)]
    description = ("the next block's gather begins before a block computes" if prefetch
                   else "a block is gathered after the one before it is dropped")
    yield f"{name}: {description}", list(gathered) == expected, (
        f"when the {LAYERS} blocks compute, forward and then again in backward, {list(gathered)} "
        f"all-gathers have been issued; expected {expected}")

    if prefetch:
        latest = [LAYERS + number + max(number, 1) for number in range(LAYERS)]
        yield "prefetch=True: a block computes while the one before it is reduced", (
            list(waits[LAYERS:]) == latest), (
            f"when the blocks compute in backward, the rank has waited {list(waits[LAYERS:])} "
            f"times; expected {latest}: wait for a gather in finish_gather() only, and for a "
            "block's reduce-scatter after the next block of backward has computed")


def check_footprint(file):
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "footprint.jsonl"
        done = subprocess.run(
            [sys.executable, "-m", "cluster.footprint", "--ranks", str(PRETENDED_RANKS),
             "--tensors", "real", "--seconds", "120", "--results", results, file],
            cwd=TOP, capture_output=True, text=True)
        if done.returncode:
            raise NotRun(f"footprint of main(): {' '.join(done.stderr.split()[-40:])}")
        footprint = json.loads(results.read_text())
    exercise = load_exercise(file)
    block_bytes = 4 * (8 * exercise.WIDTH**2 + 5 * exercise.WIDTH)
    state = 4 * exercise.LAYERS * block_bytes // PRETENDED_RANKS
    peak = footprint["memory"]["peak"]
    sent = sum(operation["bytes"] for operation in footprint["sent"])
    print(f"  main() as rank 0 of {PRETENDED_RANKS}: peak {peak:,} bytes, of which {state:,} are "
          f"shards (parameters, gradients, Adam's two moments);\n  a whole block has "
          f"{block_bytes:,}, all {exercise.LAYERS} of them {exercise.LAYERS * block_bytes:,}. It "
          f"sends {sent:,} bytes per step")
    yield "at the peak at most five blocks' bytes are there besides the shards", (
        peak <= state + 5 * block_bytes), (
        f"{(peak - state) / block_bytes:.1f} blocks' bytes: two gathered blocks, one block's "
        "gradients, twice for a moment, and activations are enough. What is not dropped?")
    expected = 3 * exercise.LAYERS * block_bytes * (PRETENDED_RANKS - 1) // PRETENDED_RANKS
    yield "it sends 3 (N-1)/N of the parameters' bytes", sent == expected, (
        f"expected {expected:,} bytes")


def time_steps(file, prefetch):
    """Return a recorded step of a larger network."""
    exercise = load_exercise(file)
    blocks = [exercise.ShardedBlock(module)
              for module in exercise.build_blocks(TIMED_LAYERS, TIMED_WIDTH)]
    optimizer = torch.optim.SGD([block.shard for block in blocks], LR)
    batch = torch.randn(TIMED_BATCH, TIMED_WIDTH)
    for block in blocks:
        block.module.register_forward_pre_hook(lambda *_: slow_link.step.begin_phase(
            "B" if torch.is_grad_enabled() else "F"))

    def run_step(step):
        step.begin_phase("F")
        exercise.train_step(blocks, optimizer, batch, prefetch)
    return slow_link.median_step(run_step)
