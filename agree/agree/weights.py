"""Judges the weights: are they equal on all ranks, before each step and at the end?

A state is {name: [checksum, *projections]}; parts are {name: which part of it a rank has}.
"""

import math
from collections import Counter

from .ranks import Findings, Lines, add_note, all_steps_of, listed, pair_steps, plural, steps_of

WEIGHT_TOLERANCE = 1e-3  # relative to how far the weights have moved
BUFFER_TOLERANCE = 1e-4  # relative to how far a buffer has moved
START_TOLERANCE = 1e-6  # relative to the weights


def judge_weights(reports: list[dict]) -> tuple[Lines, Findings]:
    """Return the lines and findings of the parameters, before each step and at the end."""
    parts = [report["parts"] for report in reports]
    findings = {}
    steps = pair_steps(reports)
    trained = {name for _, rank_steps in steps for name in rank_steps[0]["state"]}
    last_states = [{name: state for name, state in report["last_state"].items() if name in trained}
                   for report in reports]
    compared = [name for name in last_states[0] if equal_parts(parts, name)]
    history = differences_by_step(steps, last_states, parts)
    at_start = next((names for number, names in history if number == 1 and names), {})
    at_end = history[-1][1]
    apart = next((number for number, names in history[:-1] if number > 1 and names), None)
    step_count = len({number for number, _ in steps})
    total = len(all_steps_of(reports[0])) if all(
        report["end"] in ("steps", "ended") for report in reports) else step_count
    whole = judge_before_sharding(reports)
    if whole:
        findings["weights"] = whole
    elif at_end and at_start:
        findings["weights"] = f"before step 1, {describe_differences(at_start, len(compared))}"
    elif at_end and not apart and changed_after_training(reports, parts):
        add_note(findings, f"at the end {describe_differences(at_end, len(compared))} differ, and "
                 "did not before the last step: right if a rank changes them only to save them")
    elif at_end or apart:  # a script may load equal weights at its end
        equal_steps = step_count if apart is None else apart - 1
        findings["apart"] = judge_learning_rates(reports) or f"after step {equal_steps}"
    else:
        findings |= judge_others(reports)
    if trained and not any(map(has_moved, reports)):
        findings["nothing trains"] = f"in {plural(step_count, 'step')}"

    text = "equal" if compared else "not compared"
    sharded = trained - set(compared)
    if sharded:
        text += f"; {plural(len(sharded), 'tensor')} of which each rank has a different shard"
    start_text = describe_differences(at_start, len(compared)) if at_start else text
    end_text = describe_differences(at_end, len(compared)) if at_end else text
    return [("weights before step 1", start_text),
            (f"weights after {plural(total, 'step')}", end_text)], findings


def changed_after_training(reports, parts):
    """Return True if the script has ended, and a tensor of each optimizer was equal up to then."""
    samples = [{step["what"][0]: step["sample"] for step in all_steps_of(report)
                if "sample" in step} for report in reports]
    return (all(report["end"] == "ended" for report in reports) and all(samples)
            and not find_differences(samples, parts) and not judge_learning_rates(reports))


def judge_others(reports):
    """Return the findings of tensors that are not trained and differ, such as a teacher's.

    What differed before a broadcast, and is equal later, is right.
    """
    parts, findings = [{}] * len(reports), {}
    first, last = ([report[key] for report in reports] for key in ("first_others", "last_others"))
    at_start, differences = find_differences(first, parts), {}
    for name, ranks in find_differences(last, parts).items():
        start, tolerance = ([], START_TOLERANCE) if name in at_start else (first, BUFFER_TOLERANCE)
        if differs([{name: state[name]} for state in last], start, parts, tolerance):
            differences[name] = ranks
    buffers = {name: ranks for name, ranks in differences.items() if name.startswith("buffer of ")}
    if buffers:
        add_note(findings, f"{describe_differences(buffers, len(last[0]))} differ: right for a "
                 "rank's own environments or a history; wrong for statistics of the data and "
                 "codebooks: average what they are computed from")
    others = {name: ranks for name, ranks in differences.items() if name not in buffers}
    if not others:
        return findings
    text = f"{describe_differences(others, len(last[0]))}, which is not trained"
    if others.keys() & at_start.keys():
        return findings | {"weights": f"before step 1, {text}"}
    name = next(iter(others))
    still = [rank for rank, (old, new) in enumerate(zip(first, last))
             if old.get(name, new[name])[0] == new[name][0]]
    return findings | {"apart": f"{text}: " + (
        f"rank {listed(still)} never changes it" if still else "each rank changes it")}


def differs(states, start, parts, tolerance):
    """Return True if the ranks' states differ by more than rounding, relative to their changes."""
    names = find_differences(states, parts)
    different = [{name: state[name] for name in names} for state in states]
    return bool(names) and relative_distance(different, start, parts) >= tolerance


def equal_parts(parts: list[dict], name: str) -> list[list[int]]:
    """Return the groups of ranks that have the same part of a parameter, if they are several."""
    groups = {}
    for rank, rank_parts in enumerate(parts):
        groups.setdefault(rank_parts.get(name, ""), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def relative_distance(states, start, parts):
    """Return the distance between the ranks' projections, relative to how far they have moved.

    If start is empty, it is relative to their size.
    """
    size = distance = 0
    for name in states[0].keys() & (start[0] if start else states[0]).keys():
        for ranks in equal_parts(parts, name):
            columns = zip(*(states[rank][name][1:] for rank in ranks))
            origin = start[ranks[0]][name][1:] if start else [0.0] * len(states[0][name][1:])
            for values, zero in zip(columns, origin):
                distance += (max(values) - min(values)) ** 2
                size += max((value - zero) ** 2 for value in values)
    if size:
        return (distance / size) ** 0.5
    return math.inf if distance else 0.0


def find_differences(states: list[dict], parts: list[dict]) -> dict[str, list[int]]:
    """Return {name of a parameter that differs: ranks whose checksum is not the most common}."""
    differences = {}
    for name in sorted(set.intersection(*map(set, states))):
        for ranks in equal_parts(parts, name):
            checksums = {rank: states[rank][name][0] for rank in ranks}
            most_common, count = Counter(checksums.values()).most_common(1)[0]
            if count < len(ranks):
                differences.setdefault(name, []).extend(
                    rank for rank in ranks if checksums[rank] != most_common or count == 1)
    return {name: sorted(ranks) for name, ranks in differences.items()}


def describe_differences(differences: dict[str, list[int]], total: int) -> str:
    name, ranks = next(iter(differences.items()))
    tensors = f"{len(differences)} of {plural(total, 'tensor')}"
    return f"{tensors}, such as {name}, on rank {listed(ranks)}"


def judge_learning_rates(reports):
    """Return the first step in which the learning rates differ, as text, or ""."""
    for number, steps in enumerate(zip(*map(all_steps_of, reports)), 1):
        rates = [step["lr"] for step in steps]
        if rates.count(rates[0]) < len(rates):
            return (f"the learning rates differ: "
                    f"{listed(f'{max(rank):.3g}' for rank in rates)} in step {number}")
    return ""


def judge_before_sharding(reports):
    """Return which whole parameters differed when FSDP2 took its shards from them, or ""."""
    before = [report["before_sharding"] for report in reports]
    names = set.intersection(*map(set, before))
    states = [{name: rank[name][1:] for name in names} for rank in before]
    parts = [{name: rank[name][0] for name in names} for rank in before]
    differences = find_differences(states, parts)
    if not differences:
        return ""
    return (f"when fully_shard() made each rank's shards from the rank's own tensors, "
            f"{describe_differences(differences, len(names))}: the shards are of different models, "
            "which does no harm only if all weights are independent random numbers")


def differences_by_step(steps, last_states, parts):
    """Return [(step number or None for the end, differences before it)], rounding excluded."""
    start = [{}] * len(last_states)  # {name: state before its first step} of each rank
    history = []
    for number, rank_steps in [*steps, (None, None)]:
        states = [step["state"] for step in rank_steps] if rank_steps else last_states
        start = [state | earlier for state, earlier in zip(states, start)]
        origin, tolerance = ([], START_TOLERANCE) if number == 1 else (start, WEIGHT_TOLERANCE)
        is_different = differs(states, origin, parts, tolerance)
        history.append((number, find_differences(states, parts) if is_different else {}))
    return history


def has_moved(report):
    """Return True if a rank's weight before any of its steps differs from that at the end."""
    last = report["last_state"]
    return any(last[name][0] != step["state"][name][0]
               for step in steps_of(report) for name in step["state"].keys() & last.keys())
