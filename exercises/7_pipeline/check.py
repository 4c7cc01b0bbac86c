"""What the grade of exercise 7 looks at."""

from itertools import accumulate

from runner import learner, on_ranks

CASES = (4, 8), (4, 2), (1, 3)  # stages and micro-batches


def points(file):
    """Yield (what, whether it is right, the hint if not), in the learner's order."""
    def on_rank(rank):
        exercise = learner(file)
        return [[exercise.schedule(stage, *case) for stage in range(case[0])] for case in CASES]

    orders, = on_ranks(file, on_rank, 1)
    for (stages, micro_batches), of_case in zip(CASES, orders):
        for what, right, hint in points_of_case(of_case, stages, micro_batches):
            yield f"stages: {stages}, micro-batches: {micro_batches}: {what}", right, hint


def points_of_case(orders, stages, micro_batches):
    """Each point takes for granted what those before it ask for."""
    passes = [(kind, number) for kind in "BF" for number in range(micro_batches)]
    wrong = [f"stage {stage} has {order}" for stage, order in enumerate(orders)
             if sorted(order, key=str) != passes]
    yield "each stage has each pass once", not wrong, (
        f"{''.join(wrong[:1])}, and has to have F and B of each of {micro_batches} once")

    timetable, left = simulate(orders)
    picture = ""
    for stage, slots in enumerate(zip(*timetable)):
        row = " ".join(f"{in_short(item):3}" for item in slots)
        picture += f"\n  stage {stage}  {row}"
    waiting = [f"stage {stage} waits at {in_short(order[0])}"
               for stage, order in enumerate(left) if order]
    yield "no stage waits for ever", not waiting, (
        f"deadlock after {len(timetable)} slots: {', '.join(waiting)}{picture}")
    most = [max(accumulate(1 if kind == "F" else -1 for kind, _ in order)) for order in orders]
    enough = [stages - stage for stage in range(stages)]
    yield "stage s has the activations of at most stages - s micro-batches", all(
        count <= limit for count, limit in zip(most, enough)), (
        f"the stages have {most} at most, and {enough} are enough: a stage warms up with a "
        "forward for each stage after it, then a forward and a backward alternate. (All forwards "
        f"first is GPipe.){picture}")
    slots = 2 * (micro_batches + stages - 1)
    yield f"all is done in {slots} slots", len(timetable) <= slots, (
        f"it takes {len(timetable)} slots: the oldest backward goes first, and a stage that waits "
        "for one before it has given enough forwards to those after it leaves them "
        f"idle{picture}")


def simulate(orders):
    """Return what each stage does in each slot, or None, and what they never come to."""
    left = [list(order) for order in orders]
    done, timetable = set(), []
    while any(left):
        ready = [stage for stage, order in enumerate(left)
                 if order and needed(stage, len(left), order[0]) <= done]
        if not ready:
            break
        slot = [order.pop(0) if stage in ready else None for stage, order in enumerate(left)]
        done |= set(enumerate(slot))
        timetable.append(slot)
    return timetable, left


def needed(stage, stages, item):
    """Return what has to be done before a pass: {(stage, (kind, micro-batch))}."""
    kind, number = item
    before = {(stage - 1, item)}
    if kind == "B":
        before = {(stage, ("F", number)), (stage + 1, item)}
    return {(other, item) for other, item in before if other in range(stages)}


def in_short(item):
    """Return a pass in short: F0."""
    return "".join(map(str, item or ""))
