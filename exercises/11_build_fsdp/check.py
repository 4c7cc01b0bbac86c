"""Checks for exercise 11: fully sharded data parallelism."""

import slow_link
import torch
import torch._dynamo  # imported once for all ranks, because optimizers need it
from runner import flatten, is_close, load_exercise, on_ranks
from torch import nn

RANKS, LAYERS, STEPS, LR = 3, 3, 3, 0.1
WIDTH = 3  # of the small network; blocks have 8 width^2 + 5 width parameters
TIMED_LAYERS, TIMED_WIDTH, TIMED_BATCH = 6, 128, 2048


def checks(file):
    yield from check_shard(file)
    scale = None
    for prefetch in False, True:
        yield from check_training(file, prefetch)
        scale = slow_link.time_step(
            file, lambda prefetch=prefetch: make_step(file, prefetch), f"{prefetch=}", scale)
    print("  (F forward, B forward again and backward, . waiting, g all-gather, r reduce-scatter)")


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
        return is_own and isinstance(shard, nn.Parameter), shard.untyped_storage().nbytes()

    are_own, sizes = zip(*on_ranks(file, run_exercise, RANKS))
    yield "self.shard has rank r's part of the parameters", all(are_own), (
        "it is an nn.Parameter with the r-th of N equal parts of the vector of all parameters")
    expected = 8 * (8 * WIDTH**2 + 5 * WIDTH) // RANKS
    yield f"it takes {expected} bytes", sizes[0] == expected, (
        f"it takes {sizes[0]} bytes: a part is a view, which keeps the whole vector alive, until "
        "you clone() it")


def check_training(file, prefetch):
    def run_exercise(rank):
        """Return for each step: are the shards right, what was gathered when, the collectives."""
        slow_link.slow_down()
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
            expected = [flatten(module.parameters()).chunk(RANKS)[rank] for module in modules]
            is_right = all(map(is_close, [block.shard.detach() for block in blocks], expected))
            kinds = [transfer.kind for transfer in recorded.transfers]
            results.append((is_right, list(computing), kinds))
        return results

    results = on_ranks(file, run_exercise, RANKS)
    yield f"{prefetch=}: {STEPS} steps are those of one rank", all(
        is_right for steps in results for is_right, *_ in steps), (
        "each rank's shard of the gradient is the sum over the ranks, divided once by their "
        "number, after the wait. Every block hands tensor.grad to the one before it")
    _, computing, kinds = results[0][0]
    gathered, whole, waits = zip(*computing)
    yield f"{prefetch=}: one block is whole when it computes", set(whole) == {1}, (
        f"{max(whole)} blocks have their parameters at the same time: drop() a block as soon as it "
        "has computed")
    yield f"{prefetch=}: two all-gathers and one reduce-scatter per block", (
        sorted(kinds) == 2 * LAYERS * ["all_gather"] + LAYERS * ["reduce_scatter"]), (
        f"{LAYERS} blocks call {' '.join(kinds)}; expected in all {2 * LAYERS} all_gather and "
        f"{LAYERS} reduce_scatter")
    ahead = 2 if prefetch else 1
    expected = [passes + min(number + ahead, LAYERS)
                for passes in (0, LAYERS) for number in range(LAYERS)]
    description = ("the next block's gather begins before a block computes" if prefetch
                   else "a block is gathered after the one before it is dropped")
    yield f"{prefetch=}: {description}", list(gathered) == expected, (
        f"when the {LAYERS} blocks compute, forward and then again in backward, {list(gathered)} "
        f"all-gathers have been issued; expected {expected}")
    if prefetch:
        latest = [LAYERS + number + max(number, 1) for number in range(LAYERS)]
        yield "prefetch=True: a block computes while the one before it is reduced", (
            list(waits[LAYERS:]) == latest), (
            f"when the blocks compute in backward, the rank has waited {list(waits[LAYERS:])} "
            f"times; expected {latest}: wait for a gather in finish_gather() only, and for a "
            "block's reduce-scatter after the next block of backward has computed")


def make_step(file, prefetch):
    """Return a function that makes a step of a larger network."""
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
    return run_step
