"""Checks for exercise 7: a pipeline schedule."""

from itertools import accumulate

from runner import load_exercise, on_ranks

CASES = (4, 8), (4, 2), (1, 3)  # stages and micro-batches


def checks(file):
    """Yield (description, passed, hint) for each check, in the order of the work."""
    def on_rank(rank):
        exercise = load_exercise(file)
        return [[exercise.schedule(stage, *case) for stage in range(case[0])] for case in CASES]

    orders, = on_ranks(file, on_rank, 1)
    for (stages, micro_batches), of_case in zip(CASES, orders):
        for description, passed, hint in check_case(of_case, stages, micro_batches):
            yield f"stages: {stages}, micro-batches: {micro_batches}: {description}", passed, hint


def check_case(orders, stages, micro_batches):
    """Each check assumes that the earlier ones passed."""
    passes = [(kind, number) for kind in "BF" for number in range(micro_batches)]
    wrong = [f"stage {stage} has {order}" for stage, order in enumerate(orders)
             if sorted(order, key=str) != passes]
    yield "every stage runs each pass exactly once", not wrong, (
        f"{''.join(wrong[:1])}, but must run F and B of each of the {micro_batches} micro-batches "
        "exactly once")

    timetable, left = simulate(orders)
    picture = ""
    for stage, slots in enumerate(zip(*timetable)):
        row = " ".join(f"{in_short(item):3}" for item in slots)
        picture += f"\n  stage {stage}  {row}"
    waiting = [f"stage {stage} waits at {in_short(order[0])}"
               for stage, order in enumerate(left) if order]
    yield "no stage waits forever", not waiting, (
        f"deadlock after {len(timetable)} slots: {', '.join(waiting)}{picture}")
    most = [max(accumulate(1 if kind == "F" else -1 for kind, _ in order)) for order in orders]
    enough = [stages - stage for stage in range(stages)]
    yield "stage s holds the activations of at most stages - s micro-batches", all(
        count <= limit for count, limit in zip(most, enough)), (
        f"the stages hold up to {most}, but {enough} are enough: a stage warms up with one forward "
        "for each stage after it, then forwards and backwards alternate. (All forwards first is "
        f"GPipe.){picture}")
    slots = 2 * (micro_batches + stages - 1)
    yield f"the schedule takes {slots} slots", len(timetable) <= slots, (
        f"it takes {len(timetable)} slots: run the oldest backward first; a stage that waits "
        "for a backward before it has sent enough forwards downstream leaves the later stages "
        f"idle{picture}")


def simulate(orders):
    """Return the pass (or None) of each stage in each slot, and the passes that never run."""
    left = [list(order) for order in orders]
    completed_passes, timetable = set(), []
    while any(left):
        ready = [stage for stage, order in enumerate(left)
                 if order and needed(stage, len(left), order[0]) <= completed_passes]
        if not ready:
            break
        slot = [order.pop(0) if stage in ready else None for stage, order in enumerate(left)]
        completed_passes |= set(enumerate(slot))
        timetable.append(slot)
    return timetable, left


def needed(stage, stages, item):
    """Return the passes that a pass needs: {(stage, (kind, micro-batch))}."""
    kind, number = item
    before = {(stage - 1, item)}
    if kind == "B":
        before = {(stage, ("F", number)), (stage + 1, item)}
    return {(other, item) for other, item in before if other in range(stages)}


def in_short(item):
    """Return a pass as text, such as F0."""
    return "".join(map(str, item or ""))
