"""What the grade of exercise 7 looks at."""

from collections import Counter
from types import SimpleNamespace

import torch
import torch.distributed as dist
from runner import learner, on_ranks
from torch import nn

CASES = (4, 8), (4, 2), (1, 3), (3, 5)  # stages and micro-batches
REAL = 3, 5  # the one that is run on ranks, too
WIDTH, IMAGES = 4, 2
WIDE = 25  # slots that a timetable shows


def watch(file):
    """The learner's orders in each case, and what ranks compute that follow them, if they can be followed."""
    def on_rank(rank):
        exercise = learner(file)
        return {case: [exercise.schedule(stage, *case) for stage in range(case[0])] for case in CASES}
    orders, = on_ranks(file, on_rank, 1)
    ranks = None
    if not any(first_hint(of_case, micro_batches) for (_, micro_batches), of_case in orders.items()):
        stages, micro_batches = REAL
        ranks = on_ranks(file, lambda rank: follow(orders[REAL][rank], rank, stages, micro_batches), stages)
    return {"orders": orders, "ranks": ranks}


def follow(order, stage, stages, micro_batches):
    """One stage on its rank: the gradients by this order, those of the undivided network, the most activations held."""
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages))).double()
    batch = torch.randn(micro_batches, IMAGES, WIDTH, dtype=torch.float64)
    network(batch.flatten(0, 1)).square().mean().backward()
    part = network[stage]
    whole = torch.cat([parameter.grad.flatten() for parameter in part.parameters()])
    part.zero_grad()
    held, most, requests = {}, 0, []
    for kind, number in order:
        room = torch.empty(IMAGES, WIDTH, dtype=torch.float64)
        if kind == "F":
            if stage > 0:
                dist.recv(room, stage - 1, tag=number)
            given = batch[number] if stage == 0 else room.requires_grad_()
            held[number] = given, part(given)
            most = max(most, len(held))
            if stage < stages - 1:
                requests.append(dist.isend(held[number][1].detach(), stage + 1, tag=number))
        else:
            given, result = held.pop(number)
            if stage < stages - 1:
                dist.recv(room, stage + 1, tag=number)
                result.backward(room)
            else:
                (result.square().mean() / micro_batches).backward()
            if stage > 0:
                requests.append(dist.isend(given.grad, stage - 1, tag=number))
    for request in requests:
        request.wait()
    gradients = torch.cat([parameter.grad.flatten() for parameter in part.parameters()])
    return {"gradients": gradients, "whole": whole, "most": most}


def simulate(orders):
    """Let the stages follow their orders: what each does in each slot, or None, and what is left if none can go on."""
    stages = len(orders)
    left = [list(order) for order in orders]
    done, timetable = set(), []
    while any(left):
        ready = [stage for stage in range(stages) if left[stage] and needed(stage, stages, left[stage][0]) <= done]
        if not ready:
            break
        slot = [left[stage].pop(0) if stage in ready else None for stage in range(stages)]
        done |= {(stage, one) for stage, one in enumerate(slot) if one}
        timetable.append(slot)
    return SimpleNamespace(timetable=timetable, left=left, done=done)


def needed(stage, stages, one):
    """What has to be done before: {(stage, (kind, micro-batch))}."""
    kind, number = one
    if kind == "F":
        return {(stage - 1, one)} if stage > 0 else set()
    return {(stage, ("F", number))} | ({(stage + 1, one)} if stage < stages - 1 else set())


def drawn(timetable):
    """The timetable as far as a line is wide, a line for each stage."""
    lines = []
    for stage, slots in enumerate(zip(*timetable[:WIDE])):
        words = [f"{told(one) if one else '':3}" for one in slots] + ["..."] * (len(timetable) > WIDE)
        lines.append(f"  stage {stage}  {' '.join(words)}".rstrip())
    return "\n".join(["", *lines])


def told(one):
    """A pass in short: F0."""
    kind, number = one
    return f"{kind}{number}"


def peak(order):
    """The most micro-batches whose activations are held at a time."""
    held = [sum(1 if kind == "F" else -1 for kind, _ in order[:place]) for place in range(len(order) + 1)]
    return max(held)


def points(facts):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    first, *others = CASES
    for what, hint in aspects(facts["orders"][first], first[1]):
        yield f"{first[0]} stages, {first[1]} micro-batches: {what}", not hint, hint
    for stages, micro_batches in others:
        hint = first_hint(facts["orders"][stages, micro_batches], micro_batches)
        yield f"{counted(stages, 'stage')}, {counted(micro_batches, 'micro-batch', 'es')}: all this", not hint, hint
    same = all(torch.allclose(fact["gradients"], fact["whole"], rtol=1e-9, atol=1e-12) for fact in facts["ranks"])
    yield f"{REAL[0]} ranks that follow it get the gradients of the undivided network", same, (
        "they do not: that is a fault of the checker")
    most = [fact["most"] for fact in facts["ranks"]]
    yield "and hold the activations of 3, 2 and 1 micro-batches at most", most == [3, 2, 1], f"they hold {most}"


def counted(number, word, plural="s"):
    return f"{number} {word}{plural if number != 1 else ''}"


def first_hint(orders, micro_batches):
    """The first hint that there is, or ''."""
    return next((hint for _, hint in aspects(orders, micro_batches) if hint), "")


def aspects(orders, micro_batches):
    """(what, the hint or '' where it is right); each looks at what is right as to those before it."""
    yield "each stage has each pass once", hint_of_content(orders, micro_batches)
    yield "in the order of the micro-batches, each forward before its backward", hint_of_order(orders)
    run = simulate(orders)
    yield "no stage waits for ever", hint_of_waiting(run)
    yield "stage s holds the activations of at most stages - s micro-batches", hint_of_memory(orders, run)
    slots = 2 * (micro_batches + len(orders) - 1)
    hint = (f"it takes {len(run.timetable)} slots: some stages wait for a backward before they have given enough "
            f"forwards to those behind, which are idle{drawn(run.timetable)}")
    bubble = f"{len(orders) - 1}/{micro_batches + len(orders) - 1}"
    yield f"{slots} slots, a bubble of {bubble}", hint if len(run.timetable) > slots else ""


def hint_of_content(orders, micro_batches):
    expected = Counter((kind, number) for kind in "FB" for number in range(micro_batches))
    for stage, order in enumerate(orders):
        if not isinstance(order, list) or not all(map(is_pass, order)):
            return f"stage {stage}: not a list of pairs like ('F', 0), but {shortened(order)}"
        found = Counter(order)
        for one in list(found - expected) + list(expected - found):
            hint = f"stage {stage} of {len(orders)}, {counted(micro_batches, 'micro-batch', 'es')}: {told(one)}"
            if one not in expected:
                return f"{hint} is in it, but there is no such pass: {words(order)}"
            return f"{hint} is in it {counted(found[one], 'time')}: {words(order)}"
    return ""


def words(order):
    return " ".join(map(told, order))


def is_pass(one):
    return isinstance(one, tuple) and list(map(type, one)) == [str, int]


def shortened(value):
    text = repr(value)
    return text if len(text) <= 150 else f"{text[:150]} ..."


def hint_of_order(orders):
    for stage, order in enumerate(orders):
        for kind in "FB":
            numbers = [number for one, number in order if one == kind]
            if numbers != sorted(numbers):
                name = "forwards" if kind == "F" else "backwards"
                why = "" if kind == "F" else ": the oldest goes first, its activations have been held longest"
                return f"stage {stage}: the {name} are in the order {', '.join(map(str, numbers))}{why}"
        for place, (kind, number) in enumerate(order):
            if kind == "B" and ("F", number) not in order[:place]:
                return f"stage {stage}: the backward of micro-batch {number} stands before its forward"
    return ""


def hint_of_waiting(run):
    if not any(run.left):
        return ""
    waits = []
    for stage, left in enumerate(run.left):
        if left:
            other, first = min(needed(stage, len(run.left), left[0]) - run.done)
            waits.append(f"{told(left[0])} of stage {stage} waits for {told(first)} of stage {other}")
    return f"deadlock after {counted(len(run.timetable), 'slot')}: {', '.join(waits)}{drawn(run.timetable)}"


def hint_of_memory(orders, run):
    peaks = [peak(order) for order in orders]
    wrong = [stage for stage, most in enumerate(peaks) if most > len(orders) - stage]
    if not wrong:
        return ""
    stage = wrong[0]
    hint = f"stage {stage} holds {peaks[stage]}, {len(orders)} - {stage} = {len(orders) - stage} are enough"
    if all(most == len(order) // 2 for most, order in zip(peaks, orders)):
        hint = f"{hint}: all forwards come before the first backward (that is GPipe)"
    elif len(set(map(tuple, orders))) == 1:
        hint = f"{hint}: all stages have the same order, but the nearer to the end, the sooner a backward can come"
    elif all(most == len(orders) - stage + 1 for stage, most in enumerate(peaks)):
        hint = f"{hint}: one forward too many at the start; when alternation begins, a forward comes first"
    return f"{hint}{drawn(run.timetable)}"
