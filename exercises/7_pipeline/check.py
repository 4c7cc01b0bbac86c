"""Checks for exercise 7: a pipeline schedule. A pass is a pair such as ("F", 0)."""

from itertools import accumulate

from runner import load_exercise, on_ranks

CASES = (4, 8), (4, 2), (1, 3)  # stages and micro-batches


def checks(file):
    def run_exercise(rank):
        exercise = load_exercise(file)
        return [[exercise.schedule(stage, *case) for stage in range(case[0])] for case in CASES]

    schedules = on_ranks(file, run_exercise, 1)[0]
    for (stages, micro_batches), orders in zip(CASES, schedules):
        for description, passed, hint in check_case(orders, stages, micro_batches):
            yield f"stages: {stages}, micro-batches: {micro_batches}: {description}", passed, hint


def check_case(orders, stages, micro_batches):
    """Check each stage's order of passes. Each check assumes that the earlier ones passed."""
    passes = [(kind, number) for kind in "BF" for number in range(micro_batches)]
    mistakes = [f"stage {stage} has {order}" for stage, order in enumerate(orders)
                if sorted(order, key=str) != passes]
    yield "every stage runs each pass exactly once", not mistakes, (
        f"{''.join(mistakes[:1])}, but must run F and B of each of the {micro_batches} "
        "micro-batches exactly once")

    timetable, remaining = simulate(orders)
    picture = ""
    for stage, slots in enumerate(zip(*timetable)):
        row = " ".join(f"{name_pass(slot):3}" for slot in slots)
        picture += f"\n  stage {stage}  {row}"
    waiting_stages = [f"stage {stage} waits at {name_pass(order[0])}"
                      for stage, order in enumerate(remaining) if order]
    yield "no stage waits forever", not waiting_stages, (
        f"deadlock after {len(timetable)} slots: {', '.join(waiting_stages)}{picture}")
    peaks = [max(accumulate(1 if kind == "F" else -1 for kind, _ in order)) for order in orders]
    limits = [stages - stage for stage in range(stages)]
    yield "stage s stores the activations of at most (stages - s) micro-batches", all(
        peak <= limit for peak, limit in zip(peaks, limits)), (
        f"the stages store up to {peaks} micro-batches' activations, but {limits} are enough: a "
        "stage warms up with one forward for each stage after it, then forwards and backwards "
        f"alternate. (All forwards first is GPipe.){picture}")
    slot_count = 2 * (micro_batches + stages - 1)
    yield f"the schedule takes {slot_count} slots", len(timetable) <= slot_count, (
        f"it takes {len(timetable)} slots: run the oldest backward first; a stage that waits "
        "for a backward before it has sent enough forwards downstream leaves the later stages "
        f"idle{picture}")


def simulate(orders):
    """Return the pass (or None) of each stage in each slot, and the passes that never run."""
    remaining = [list(order) for order in orders]
    completed, timetable = set(), []
    while any(remaining):
        ready_stages = [
            stage for stage, order in enumerate(remaining)
            if order and required_passes(stage, len(remaining), order[0]) <= completed]
        if not ready_stages:
            break
        slot = [order.pop(0) if stage in ready_stages else None
                for stage, order in enumerate(remaining)]
        completed |= set(enumerate(slot))
        timetable.append(slot)
    return timetable, remaining


def required_passes(stage, stages, stage_pass):
    """Return the passes that must come before a stage's pass: a set of (stage, pass)."""
    kind, number = stage_pass
    required = {(stage - 1, stage_pass)}
    if kind == "B":
        required = {(stage, ("F", number)), (stage + 1, stage_pass)}
    return {(other, other_pass) for other, other_pass in required if 0 <= other < stages}


def name_pass(stage_pass):
    """Return a pass as text, such as F0, and None as an empty text."""
    return "".join(map(str, stage_pass or ""))
