"""What the grade of exercise 7 looks at."""

from collections import Counter
from itertools import accumulate
from operator import le

from runner import learner, on_ranks

CASES = (4, 8), (4, 2), (1, 3), (3, 5)  # stages and micro-batches
WIDE = 25  # slots that a timetable shows


def points(file):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    def on_rank(rank):
        exercise = learner(file)
        return [[exercise.schedule(stage, *case) for stage in range(case[0])] for case in CASES]
    orders, = on_ranks(file, on_rank, 1)
    for (stages, micro_batches), of_case in zip(CASES, orders):
        for what, right, hint in points_of_case(of_case, stages, micro_batches):
            yield f"stages: {stages}, micro-batches: {micro_batches}: {what}", right, hint


def points_of_case(orders, stages, micro_batches):
    """Each point takes for granted what those before it ask for."""
    passes = [(kind, number) for kind in "FB" for number in range(micro_batches)]
    stage = next((stage for stage, order in enumerate(orders) if not isinstance(order, list)
                  or Counter(map(repr, order)) != Counter(map(repr, passes))), None)
    yield "each stage has each pass once", stage is None, (
        f"stage {stage} has {orders[stage or 0]!s:.300}, and has to have F and B of each of {micro_batches} once")
    stage = next((stage for stage, order in enumerate(orders)
                  if sorted(order, key=lambda one: one[0]) != sorted(order)), None)
    yield "in the order of the micro-batches, forwards and backwards", stage is None, (
        f"stage {stage} has {' '.join(map(told, orders[stage or 0]))}. Of backwards, too, the oldest goes first")

    timetable, waiting = simulate(orders)
    rows = [" ".join(f"{told(one):3}" for one in slots[:WIDE]) for slots in zip(*timetable)]
    picture = "".join(f"\n  stage {stage}  {row}" for stage, row in enumerate(rows))
    yield "no stage waits for ever", not waiting, (
        f"deadlock after {len(timetable)} slots: {', '.join(waiting)}{picture}")
    most = [max(accumulate(1 if kind == "F" else -1 for kind, _ in order)) for order in orders]
    enough = [stages - stage for stage in range(stages)]
    yield "stage s holds the activations of at most stages - s micro-batches", all(map(le, most, enough)), (
        f"the stages hold {most} at most, and {enough} are enough: a stage warms up with a forward for each stage "
        f"behind it, then a forward and a backward alternate. (All forwards first is GPipe.){picture}")
    slots = 2 * (micro_batches + stages - 1)
    yield f"{slots} slots, a bubble of {stages - 1}/{micro_batches + stages - 1}", len(timetable) <= slots, (
        f"it takes {len(timetable)} slots: some stages wait for a backward before they have given enough forwards to "
        f"those behind, which are idle{picture}")


def simulate(orders):
    """Let the stages follow their orders: what each does in each slot, or None, and who waits for whom for ever."""
    left = [list(order) for order in orders]
    done, timetable, ready = set(), [], True
    while any(left):
        ready = [stage for stage, order in enumerate(left) if order and needed(stage, len(left), order[0]) <= done]
        if not ready:
            break
        slot = [order.pop(0) if stage in ready else None for stage, order in enumerate(left)]
        done |= set(enumerate(slot))
        timetable.append(slot)
    waiting = []
    for stage, order in enumerate(left):
        if order:
            other, first = min(needed(stage, len(left), order[0]) - done)
            waiting.append(f"{told(order[0])} of stage {stage} waits for {told(first)} of stage {other}")
    return timetable, waiting


def needed(stage, stages, one):
    """What has to be done before: {(stage, (kind, micro-batch))}."""
    kind, number = one
    before = {(stage - 1, one)} if kind == "F" else {(stage, ("F", number)), (stage + 1, one)}
    return {(other, one) for other, one in before if other in range(stages)}


def told(one):
    """A pass in short: F0."""
    return "".join(map(str, one or ""))
