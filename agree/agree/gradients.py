"""Judges the gradients: does every optimizer use the mean of the ranks' own?

Gradients are compared as projections, {name: numbers}. These are linear: a mean's projections are
the mean of the ranks'.
"""

import math
from statistics import median

import numpy

from .ranks import (
    Findings,
    Lines,
    add_note,
    events_before,
    listed,
    pair_steps,
    plural,
    samples_before,
)

GRADIENT_TOLERANCE = 1e-3  # relative; for fp32 in another order of summation; mistakes exceed 0.1
HALF_TOLERANCE = 3e-2  # for gradients in bf16 or fp16
FACTOR_TOLERANCE = 0.02  # for a factor: 1, the number of ranks, or its inverse
NEGLIGIBLE = 1e-6  # a tensor's gradient below this share of the largest counts as 0

TEXTS = {"mean": "the mean of the ranks' own", "scaled": "their mean times a factor",
         "own gradients": "each rank's own", "sum": "the sum of the ranks' own",
         "shared": "the same on all ranks, changed after they were averaged"}


def judge_gradients(reports: list[dict]) -> tuple[Lines, Findings]:
    """Return the line and findings of the gradients that the optimizers use."""
    findings = {}
    classified = classify_steps(reports, findings)
    loss_divided = all(is_loss_divided(reports, rank_steps)
                       for _, rank_steps in pair_steps(reports))
    for steps in classified.values():
        one_kind = len({kind for _, kind, _ in steps}) == 1
        for number, kind, details in steps:
            if kind in ("sum", "twice") and not one_kind:
                kind = "scaled"  # clipping: a mistake gives the same factor in each step
            if kind == "sum" and loss_divided:
                kind = "mean"
            since = f"since step {number}"
            findings.setdefault(kind, f"{details}, {since}" if details else since)
    own = sorted({name for names, steps in classified.items()
                  for _, kind, _ in steps if kind == "own gradients" for name in names})
    if own and findings.keys() & {"mean", "sum", "scaled", "shared"}:
        total = {name for names in classified for name in names}
        text = describe_part(own, len(total)) if len(own) < len(total) else "all, in some steps"
        findings.setdefault("part", text)
        del findings["own gradients"]
    if "mean" in findings and loss_divided and reports[0]["wrappers"]:
        add_note(findings, "the loss seems to be divided by the number of ranks (times "
                 "micro-batches), or of all ranks' samples: if that is for the average over the "
                 "ranks, the wrapper averages again, and the gradients are too small")
    if reports[0]["comm_hook"] and findings.pop("other gradients", ""):  # such as PowerSGD
        add_note(findings, f"DDP's hook {reports[0]['comm_hook']} changes the gradients: not "
                 "compared")
    kinds = listed(TEXTS.get(kind, kind) for kind in findings if kind != "note")
    return [("gradients the optimizer uses", kinds or "not seen")], findings


def classify_steps(reports, findings):
    """Return {names of tensors: [(step number, kind, details)]}; add to findings."""
    is_half = reports[0]["comm_hook"] or any(report["half_precision"] for report in reports)
    tolerance = HALF_TOLERANCE if is_half else GRADIENT_TOLERANCE
    classified = {}
    for number, steps in pair_steps(reports):
        details = describe_not_finite(steps)
        if details:
            findings.setdefault("not finite", f"{details}, since step {number}")
            continue
        details = changed_after_reduction(reports, steps, tolerance)
        if details:
            findings.setdefault("other gradients", f"{details}, since step {number}")
            continue
        own = [step["own"] for step in steps]
        used = [step["used"] for step in steps]
        names = sorted(set.intersection(*map(set, [*own, *used])))
        if not any(any(rank[name]) for rank in own for name in names):
            continue
        used = add_shards(used, [report["parts"] for report in reports])
        kind, details = classify(own, used, names, tolerance)
        if kind == "twice" and len(samples_before(reports[0], steps[0])) == len(reports):
            kind = "scaled"  # a mean over as many micro-batches as ranks
        if kind in ("shared", "scaled") and changed_before_average(steps, tolerance):
            kind, details = "other gradients", (
                "a rank's own were changed between two backward passes, before they were averaged")
        elif kind == "shared":
            add_note(findings, "the gradients are the same on all ranks, but not the mean of the "
                     "ranks' own: right if they were changed after averaging, wrong if before")
        classified.setdefault(tuple(names), []).append((number, kind, details))
    return classified


def concatenate(gradients, names):
    return numpy.array([number for name in names for number in gradients[name]])


def fit_factor(values, base):
    """Return the factor for which factor * base is nearest to values, and the relative residual."""
    square, size = base @ base, numpy.linalg.norm(values)
    factor = values @ base / square if square else 0.0
    return factor, numpy.linalg.norm(values - factor * base) / size if size else 0.0


def all_close(vectors, tolerance):
    """Return True if all ranks' vectors are equal, within a tolerance relative to their norm."""
    size = max(map(numpy.linalg.norm, vectors))
    return all(numpy.linalg.norm(values - vectors[0]) <= tolerance * size for values in vectors)


def are_equal(numbers):
    return max(numbers) - min(numbers) <= FACTOR_TOLERANCE * max(map(abs, numbers))


def is_own_scaled(used, own, tolerance):
    """Return True if each rank uses its own gradient, times a factor (such as of clipping)."""
    return all(fit_factor(used_values, own_values)[1] < tolerance
               for used_values, own_values in zip(used, own))


def classify(own, used, names, tolerance):
    """Return (kind, details) of a step's gradients: a finding, "mean", "scaled" or "shared".

    own and used: {name: projections} of each rank, before and after averaging.
    """
    sizes = {name: max(numpy.linalg.norm(rank[name]) for rank in own) for name in names}
    names = [name for name in names if sizes[name] > NEGLIGIBLE * max(sizes.values())]
    own_vectors = [concatenate(rank, names) for rank in own]
    used_vectors = [concatenate(rank, names) for rank in used]
    mean = sum(own_vectors) / len(own)
    fits = [fit_factor(values, mean) for values in used_vectors]
    if all(residual < tolerance for _, residual in fits):
        factors = [factor for factor, _ in fits]
        if are_equal(factors):
            return classify_factor(median(factors), len(own))
        if not is_own_scaled(used_vectors, own_vectors, tolerance):
            return "other gradients", f"the mean times {listed(f'{f:.4g}' for f in factors)}"
    for rank, values in enumerate(own_vectors):
        if all(all_close([other, values], tolerance) for other in used_vectors):
            return "one rank's", f"those of rank {rank}"
    if is_own_scaled(used_vectors, own_vectors, tolerance):
        return "own gradients", ""
    differ = [name for name in names
              if not all_close([concatenate(rank, [name]) for rank in used], tolerance)]
    clipped = len(differ) == len(names)  # by each rank's own norm, those that are averaged, too
    kinds = {name: classify_tensor(own, used, name, tolerance, clipped) for name in differ}
    own_names = [name for name, kind in kinds.items() if kind == "own"]
    if own_names and "other" not in kinds.values():
        return "part", describe_part(own_names, len(names))
    if differ:
        return "other gradients", f"they differ by rank, such as {differ[0]}"
    return "shared", ""


def describe_part(own_names, total):
    return f"{len(own_names)} of {plural(total, 'tensor')}, such as {own_names[0]}"


def classify_tensor(own, used, name, tolerance, clipped):
    """Return "mean", "own" or "other"; clipped: each rank may have multiplied by its own factor."""
    own, used = ([concatenate(rank, [name]) for rank in gradients] for gradients in (own, used))
    if clipped and all(fit_factor(values, sum(own))[1] < tolerance for values in used):
        return "mean"
    return "own" if is_own_scaled(used, own, tolerance) else "other"


def classify_factor(factor, world_size):
    """Return (kind, details) if every rank uses the mean gradient times this factor."""
    for kind, expected in ("mean", 1), ("sum", world_size), ("twice", 1 / world_size):
        if abs(factor - expected) < FACTOR_TOLERANCE * expected:
            return kind, f"the mean times {factor:.3g}"
    return "scaled", f"the mean times {factor:.4g}"


def add_shards(used_gradients, parts):
    """Return the ranks' gradients; shards are replaced by the sum of the different ones."""
    sums = {}
    for name in set.intersection(*map(set, used_gradients)):
        shards = {rank_parts.get(name, ""): gradients[name]
                  for rank_parts, gradients in zip(parts, used_gradients)}
        if len(shards) > 1:
            sums[name] = [sum(column) for column in zip(*shards.values())]
    return [rank | sums for rank in used_gradients]


def describe_not_finite(rank_steps):
    """Return which ranks have non-finite gradients, before or after averaging, as text."""
    for key, stage in ("own", "before averaging"), ("used", "after averaging"):
        not_finite = [rank for rank, step in enumerate(rank_steps)
                      if not all(math.isfinite(n) for values in step[key].values() for n in values)]
        if not_finite:
            return f"on rank {listed(not_finite)}, {stage}"
    return ""


def changed_after_reduction(reports, rank_steps, tolerance):
    """Return by what each rank multiplied its shards' averaged gradients, if not by one factor."""
    factors = []
    for report, step in zip(reports, rank_steps):
        names = [name for name in step["left"].keys() & step["used"].keys()
                 if report["parts"].get(name)]
        left, used = (concatenate(step[key], names) for key in ("left", "used"))
        factor, residual = fit_factor(used, left)
        if residual > tolerance:
            return ""
        factors += [factor] if any(left) else []
    if not factors or are_equal(factors):
        return ""
    return (f"each rank multiplies the gradients of its shards by its own factor, "
            f"{listed(f'{factor:.4g}' for factor in factors)}, after they were averaged")


def changed_before_average(steps, tolerance):
    """Return True if gradients were changed between two backward passes, while still a rank's own.

    Clipping each micro-batch does so under no_sync(), but not if each backward pass averages.
    """
    changed = [step["changed"] for step in steps]
    names = set.intersection(*map(set, changed))
    return bool(names) and not all_close([concatenate(rank, names) for rank in changed], tolerance)


def is_loss_divided(reports, rank_steps):
    """Return True if a loss was divided by the world size or by all ranks' samples."""
    size = len(reports)
    backwards = [event["divisors"] for event in events_before(reports[0], rank_steps[0])
                 if event["kind"] == "backward"]
    divisors = [divisor for numbers in backwards for divisor in numbers]
    samples = sum(len(batch) for report, step in zip(reports, rank_steps)
                  for batch in samples_before(report, step))
    if any(abs(divisor * size - 1) < FACTOR_TOLERANCE for divisor in divisors):
        return False  # it was multiplied by the number of ranks, too
    return any(abs(divisor - expected) < FACTOR_TOLERANCE * expected
               for divisor in divisors for expected in (size * len(backwards), samples))


def equal_own_gradients(reports: list[dict]) -> dict[str, bool]:
    """Return {optimizer: True if all ranks' own gradients are equal in each step}.

    If so, the samples are equal, too. The gradients of all parameters must have been seen.
    """
    is_equal = {}
    for _, rank_steps in pair_steps(reports):
        gradients = [step["own"] for step in rank_steps]
        names = sorted(set.intersection(*map(set, gradients)))
        vectors = [concatenate(rank, names) for rank in gradients]
        equal = (len(names) >= len(rank_steps[0]["state"]) and any(vectors[0])
                 and all_close(vectors, 1e-5))
        optimizer, = rank_steps[0]["what"]
        is_equal[optimizer] = bool(equal) and is_equal.get(optimizer, True)
    return is_equal
