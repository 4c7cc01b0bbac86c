"""Judges the reports of all ranks: returns the lines of agree's table, and the findings."""

import math
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import combinations, product
from statistics import median

from .messages import SYMPTOMS, find_fix

# Relative tolerances
GRADIENT_TOLERANCE = 1e-3  # for fp32 in another order of summation; mistakes exceed 0.1
HALF_TOLERANCE = 3e-2  # for gradients in bf16 or fp16
FACTOR_TOLERANCE = 0.02  # for a factor: 1, the number of ranks, or its inverse
WEIGHT_TOLERANCE = 1e-3  # for weights, relative to how far they have moved
NEGLIGIBLE = 1e-6  # a tensor's gradient below this share of the largest counts as 0

say = partial(print, file=sys.__stdout__)  # even if the script redirects sys.stdout

NO_SYNC = ("whose gradients stay on their rank, and the optimizer gets none: "
           "set_requires_gradient_sync(False) is in effect at the optimizer's step")
NOTHING_WRONG, NOT_CHECKED = "nothing wrong was found", "not checked: see the note"
CAUSES = {  # {finding: its possible causes}; a finding is hidden if one of its causes was found
    "weights": {"alone"},
    "apart": {"alone", "own gradients", "part", "one rank's", "other gradients", "not finite",
              "unequal data"},
    "own gradients": {"alone"},
    "same data": {"alone", "sampler"},
    "overlap": {"alone", "sampler"},
    "unequal data": {"sampler"},
    "nothing trains": {"not finite"},
}

Findings = dict[str, str]  # {name of a finding, or "note": details}
Lines = list[tuple[str, str]]  # rows of the table: (what was compared, the result)


def listed(values: Iterable) -> str:
    return ", ".join(map(str, values))


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def add_note(findings: Findings, text: str) -> None:
    findings["note"] = f"{findings['note']}; {text}" if "note" in findings else text


# Steps: step k of an optimizer is compared with step k of the same optimizer on other ranks.

def pair_steps(reports: list[dict]) -> list[tuple[int, list[dict]]]:
    """Return (step number, [the step on each rank]) for the steps that all ranks have taken."""
    ranks = []
    for report in reports:
        steps, counts = {}, Counter()
        for step in report["steps"]:
            optimizer = step["optimizer"]
            counts[optimizer] += 1
            steps[optimizer, counts[optimizer]] = step
        ranks.append(steps)
    keys = [key for key in ranks[0] if all(key in steps for steps in ranks)]
    return [(number, [steps[optimizer, number] for steps in ranks]) for optimizer, number in keys]


# Groups of ranks: those that divide layers among them, by tensor parallelism, share a batch.

def find_tensor_groups(reports: list[dict]) -> list[list[int]]:
    """Return the groups of ranks that divide layers, equally large; else each rank is a group."""
    groups = sorted({tuple(report["tensor_group"]) for report in reports})
    if sorted(rank for group in groups for rank in group) == list(range(len(reports))) and len(
            {len(group) for group in groups}) == 1:
        return list(map(list, groups))
    return [[rank] for rank in range(len(reports))]


def judge_groups(reports):
    """Return the line of tensor parallelism, if there is any."""
    groups = find_tensor_groups(reports)
    text = " | ".join(",".join(map(str, group)) for group in groups)
    if len(groups) < len(reports):
        return [("tensor parallel", f"ranks {text}: a group divides layers and shares a batch")], {}
    return [], {}


# Weights: a state is {name: [checksum, *projections]}; shards: {name: which part a rank has}.

def equal_parts(shards: list[dict], name: str) -> list[list[int]]:
    """Return the groups of ranks that have the same part of a parameter, if they are several."""
    groups = {}
    for rank, parts in enumerate(shards):
        groups.setdefault(parts.get(name, ""), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def relative_distance(states, start, shards):
    """Return the distance between the ranks' projections, relative to how far they have moved.

    If start is empty, it is relative to their size.
    """
    size = distance = 0
    for name in states[0].keys() & (start[0] if start else states[0]).keys():
        for ranks in equal_parts(shards, name):
            columns = zip(*(states[rank][name][1:] for rank in ranks))
            origin = [0.0] * len(states[0][name][1:])
            if start:
                origin = start[ranks[0]][name][1:]
            for values, zero in zip(columns, origin):
                distance += (max(values) - min(values)) ** 2
                size += max((value - zero) ** 2 for value in values)
    if size:
        return (distance / size) ** 0.5
    return math.inf if distance else 0.0


def find_differences(states, shards):
    """Return {name of a parameter that differs: ranks whose checksum is not the most common}."""
    differences = {}
    for name in sorted(set.intersection(*map(set, states))):
        for ranks in equal_parts(shards, name):
            checksums = {rank: states[rank][name][0] for rank in ranks}
            most_common, count = Counter(checksums.values()).most_common(1)[0]
            if count < len(ranks):
                differences.setdefault(name, []).extend(
                    rank for rank in ranks if checksums[rank] != most_common or count == 1)
    return {name: sorted(ranks) for name, ranks in differences.items()}


def describe_differences(differences, total):
    name, ranks = next(iter(differences.items()))
    tensors = f"{len(differences)} of {plural(total, 'tensor')}"
    return f"{tensors}, such as {name}, on rank {listed(ranks)}"


def judge_weights(reports):
    """Return the lines and findings of the parameters, before each step and at the end."""
    shards = [report["shards"] for report in reports]
    findings = {}
    steps = pair_steps(reports)
    trained = {name for _, rank_steps in steps for name in rank_steps[0]["state"]}
    last_states = [report["last_state"] for report in reports]
    last_states = [{name: state[name] for name in trained & state.keys()} for state in last_states]
    compared = [name for name in last_states[0] if equal_parts(shards, name)]
    history = differences_by_step(steps, last_states, shards)
    at_start = next((names for number, names in history if number == 1 and names), {})
    at_end = history[-1][1]
    step_count = len({number for number, _ in steps})
    mosaic = judge_before_sharding(reports)
    if mosaic:
        findings["weights"] = mosaic
    elif at_end and at_start:
        findings["weights"] = f"before step 1, {describe_differences(at_start, len(compared))}"
    elif at_end:
        equal_steps = [number for number, names in history if number and not names]
        findings["apart"] = f"since step {max(equal_steps, default=1)}"
    elif at_start:
        add_note(findings, "the weights differed before step 1, and are equal after the last")
    not_reduced = reports[0]["steps"][-1]["not reduced"]
    if not_reduced and any(map(has_moved, reports)):
        findings["part"] = (f"{len(not_reduced)} of {plural(len(trained), 'tensor')}, such as "
                            f"{not_reduced[0]}, {NO_SYNC}")
    elif trained and not any(map(has_moved, reports)):
        findings["nothing trains"] = why_nothing_trains(reports, step_count)

    text = "equal" if compared else "not compared"
    sharded = trained - set(compared)
    if sharded:
        text += f"; {plural(len(sharded), 'tensor')} of which each rank has a different shard"
    start_text = describe_differences(at_start, len(compared)) if at_start else text
    end_text = describe_differences(at_end, len(compared)) if at_end else text
    return [("weights before step 1", start_text),
            (f"weights after {plural(step_count, 'step')}", end_text)], findings


def judge_before_sharding(reports):
    """Return which whole parameters differed when FSDP2 took its shards from them, or ""."""
    parts = [report["before_sharding"] for report in reports]
    names = set.intersection(*map(set, parts))
    states = [{name: rank_parts[name][1:] for name in names} for rank_parts in parts]
    shards = [{name: rank_parts[name][0] for name in names} for rank_parts in parts]
    differences = find_differences(states, shards)
    if not differences:
        return ""
    return (f"when fully_shard() made each rank's shards from the rank's own tensors, "
            f"{describe_differences(differences, len(names))}: the shards are of different models")


def differences_by_step(steps, last_states, shards):
    """Return [(step number or None for the end, differences before it)], rounding excluded."""
    start = []  # {name: state before its first step} of each rank
    history = []
    for number, rank_steps in [*steps, (None, None)]:
        states = [step["state"] for step in rank_steps] if rank_steps else last_states
        differences = find_differences(states, shards)
        start = [state | earlier for state, earlier in zip(states, start or [{}] * len(states))]
        origin = [] if number == 1 else start
        limit = 1e-6 if number == 1 else WEIGHT_TOLERANCE
        different = [{name: state[name] for name in differences} for state in states]
        if differences and relative_distance(different, origin, shards) < limit:
            differences = {}
        history.append((number, differences))
    return history


def checksums_of(state):
    return {name: values[0] for name, values in state.items()}


def find_source_of_weights(reports):
    """Return the rank whose weights replace the others' between two steps, or None."""
    steps = {}  # {optimizer: its last step, on each rank}
    for _, rank_steps in pair_steps(reports):
        optimizer = rank_steps[0]["optimizer"]
        earlier = [step.get("state_after", {}) for step in steps.get(optimizer, [])]
        steps[optimizer] = rank_steps
        if not earlier or not all(earlier):
            continue
        later = [checksums_of(step["state"]) for step in rank_steps]
        is_source = [checksums_of(state) == later[0] for state in earlier]
        if later.count(later[0]) == len(later) and any(is_source) and not all(is_source):
            return is_source.index(True)
    return None


def has_moved(report):
    """Return True if a rank's weight before any of its steps differs from that at the end."""
    last = report["last_state"]
    return any(last[name][0] != step["state"][name][0]
               for step in report["steps"] for name in step["state"].keys() & last.keys())


def why_nothing_trains(reports, step_count):
    """Return why the steps may have changed no weight."""
    step = reports[0]["steps"][-1]
    details = f"in {plural(step_count, 'step')}"
    if step["not reduced"]:
        return f"{details}; {plural(len(step['not reduced']), 'tensor')}, {NO_SYNC}"
    if step["without gradient"] and not step["used_gradients"]:
        return (f"{details}; {plural(step['without gradient'], 'parameter')} of the optimizer "
                "have no gradient, other tensors have one")
    gradients = [number for values in step["used_gradients"].values() for number in values]
    if gradients and not any(gradients):
        return f"{details}; all gradients are 0"
    if not step["lr"]:
        return f"{details}; the learning rate is 0"
    return details


# Gradients, as projections. These are linear: a mean's projections are the mean of the ranks'.

def concatenate(gradients, names):
    return [number for name in names for number in gradients[name]]


def norm(values):
    return sum(value * value for value in values) ** 0.5


def fit_factor(values, base):
    """Return the factor for which factor * base is nearest to values, and the relative residual."""
    square = sum(b * b for b in base)
    factor = sum(a * b for a, b in zip(values, base)) / square if square else 0.0
    residual = norm([a - factor * b for a, b in zip(values, base)])
    size = norm(values)
    return factor, residual / size if size else 0.0


def all_close(vectors, tolerance):
    """Return True if all ranks' vectors are equal, within a tolerance relative to their norm."""
    size = max(map(norm, vectors))
    return all(norm([a - b for a, b in zip(values, vectors[0])]) <= tolerance * size
               for values in vectors)


def is_own_gradient_scaled(used, own, tolerance):
    """Return True if each rank uses its own gradient, times a factor (such as of clipping)."""
    return all(fit_factor(used_values, own_values)[1] < tolerance
               for used_values, own_values in zip(used, own))


def add_shards(used_gradients, shards):
    """Return the ranks' gradients; shards are replaced by the sum of the different ones."""
    sums = {}
    for name in set.intersection(*map(set, used_gradients)):
        parts = {parts.get(name.split(", ")[0], ""): gradients[name]
                 for parts, gradients in zip(shards, used_gradients)}
        if len(parts) > 1:
            sums[name] = [sum(column) for column in zip(*parts.values())]
    return [rank | sums for rank in used_gradients]


def factors_after_reduction(rank_steps, tolerance):
    """Return by what each rank multiplied its shards' gradients after they were averaged, or []."""
    factors = []
    for step in rank_steps:
        names = step["reduced_gradients"].keys() & step["used_gradients"].keys()
        vectors = [concatenate(step[key], names) for key in ("used_gradients", "reduced_gradients")]
        factor, residual = fit_factor(*vectors)
        if residual > tolerance:
            return []
        factors += [factor] if any(vectors[1]) else []
    return factors


def classify_gradients(own_gradients, used_gradients, names, tolerance, sample_counts, ranks):
    """Return (kind, details) of a step's gradients: a finding, "mean", "scaled" or "shared".

    own_gradients and used_gradients: {name: projections} of each rank, before and after averaging.
    """
    sizes = {name: max(norm(rank[name]) for rank in own_gradients) for name in names}
    names = [name for name in names if sizes[name] > NEGLIGIBLE * max(sizes.values())]
    own_vectors = [concatenate(rank, names) for rank in own_gradients]
    used_vectors = [concatenate(rank, names) for rank in used_gradients]
    world_size = len(own_vectors)
    mean = [sum(column) / world_size for column in zip(*own_vectors)]
    fits = [fit_factor(values, mean) for values in used_vectors]
    if all(residual < tolerance for _, residual in fits):
        factors = [factor for factor, _ in fits]
        if max(factors) - min(factors) < FACTOR_TOLERANCE * max(map(abs, factors)):
            return classify_factor(median(factors), world_size)
        if not is_own_gradient_scaled(used_vectors, own_vectors, tolerance):
            return "other gradients", f"the mean times {listed(f'{f:.4g}' for f in factors)}"
    for rank in range(world_size):
        if all(all_close([values, own_vectors[rank]], tolerance) for values in used_vectors):
            return "one rank's", f"those of rank {ranks[rank]}"
    if is_own_gradient_scaled(used_vectors, own_vectors, tolerance):
        return "own gradients", ""
    kinds = {name: classify_tensor(own_gradients, used_gradients, name, tolerance)
             for name in names}
    own = [name for name, kind in kinds.items() if kind == "own"]
    other = [name for name, kind in kinds.items() if kind == "other"]
    lost = [name for name, kind in kinds.items() if kind == "lost"]
    if own and not other:
        return "part", f"{len(own)} of {plural(len(names), 'tensor')}, such as {own[0]}"
    if other or own:
        return "other gradients", f"they differ by rank, such as {(other or own)[0]}"
    if lost:
        return "other gradients", f"{lost[0]}: it is 0, but the ranks' own are not"
    weights = []
    if len(mean) > world_size:
        weights = mixing_weights(used_vectors[0], own_vectors, tolerance)
    if weights and max(weights) - min(weights) > FACTOR_TOLERANCE * max(map(abs, weights)):
        return classify_mixing_weights(weights, sample_counts)
    return "shared", ""


def classify_mixing_weights(weights, sample_counts):
    """Return (kind, details) of a weighted mean: "mean" if weighted by the numbers of samples."""
    expected = [0] * len(weights)
    if all(sample_counts):
        expected = [count / sum(sample_counts) for count in sample_counts]
    errors = [weight / sum(weights) - share for weight, share in zip(weights, expected)]
    if max(map(abs, errors)) > FACTOR_TOLERANCE:
        factors = listed(f"{weight * len(weights):.3g}" for weight in weights)
        return "other gradients", f"the mean of the ranks' own times {factors}"
    return "mean", "weighted by the ranks' numbers of samples"


def classify_tensor(own_gradients, used_gradients, name, tolerance):
    """Return "shared", "own", "lost" (a real or imaginary part) or "other" for one tensor."""
    own = [rank[name] for rank in own_gradients]
    used = [rank[name] for rank in used_gradients]
    if all_close(used, tolerance):
        is_complex_part = name.endswith((", real", ", imaginary"))
        if is_complex_part and not any(map(norm, used)) and all(map(norm, own)):
            return "lost"
        return "shared"
    return "own" if is_own_gradient_scaled(used, own, tolerance) else "other"


def mixing_weights(used_vector, own_vectors, tolerance):
    """Return the weights with which the ranks' own vectors add up to the used one, or []."""
    import numpy
    base = numpy.array(own_vectors).T
    weights = numpy.linalg.lstsq(base, numpy.array(used_vector), rcond=None)[0]
    residual = norm(base @ weights - used_vector)
    return weights.tolist() if residual < tolerance * norm(used_vector) else []


def classify_factor(factor, world_size):
    """Return (kind, details) if every rank uses the mean gradient times this factor."""
    for kind, expected in ("mean", 1), ("sum", world_size), ("twice", 1 / world_size):
        if abs(factor - expected) < FACTOR_TOLERANCE * expected:
            return kind, f"the mean times {factor:.3g}"
    return "scaled", f"the mean times {factor:.4g}"


def is_loss_divided(rank_steps):
    """Return True if a loss was divided by the world size or by all ranks' samples."""
    samples = sum(len(batch) for step in rank_steps for batch in step["samples"])
    if any(abs(divisor * len(rank_steps) - 1) < FACTOR_TOLERANCE
           for divisor in rank_steps[0]["divisors"]):
        return False  # it was multiplied by the number of ranks, too
    return any(abs(divisor - expected) < FACTOR_TOLERANCE * expected
               for divisor in rank_steps[0]["divisors"]
               for expected in (len(rank_steps) * rank_steps[0]["micro_batches"], samples))


def describe_not_finite(rank_steps):
    """Return which ranks have non-finite gradients, before or after averaging, as text."""
    for key, stage in ("own_gradients", "before averaging"), ("used_gradients", "after averaging"):
        not_finite = [rank for rank, step in enumerate(rank_steps)
                      if not all(map(math.isfinite, concatenate(step[key], step[key])))]
        if not_finite:
            return f"on rank {listed(not_finite)}, {stage}"
    return ""


def judge_gradients(reports):
    """Return the lines and findings of the gradients in each step.

    They are averaged over ranks with the same place in their tensor-parallel groups.
    """
    comm_hook = reports[0]["comm_hook"]
    is_half = comm_hook or any(report["half_precision"] for report in reports)
    tolerance = HALF_TOLERANCE if is_half else GRADIENT_TOLERANCE
    groups = find_tensor_groups(reports)
    kinds_by_tensors = {}  # {(ranks, names of a step's tensors): [(step number, kind, details)]}
    findings, loss_divided = {}, False
    for (number, rank_steps), ranks in product(pair_steps(reports), zip(*groups)):
        details = describe_not_finite(rank_steps)
        if details:
            findings.setdefault("not finite", f"{details}, since step {number}")
            continue
        factors = factors_after_reduction(rank_steps, tolerance)
        if factors and max(factors) - min(factors) > FACTOR_TOLERANCE * max(map(abs, factors)):
            details = (f"each rank multiplies the gradients of its shards by its own factor, "
                       f"{listed(f'{factor:.4g}' for factor in factors)}, after they were averaged")
            findings.setdefault("other gradients", f"{details}, since step {number}")
            continue
        rank_steps = [rank_steps[rank] for rank in ranks]
        own_gradients = [step["own_gradients"] for step in rank_steps]
        used_gradients = [step["used_gradients"] for step in rank_steps]
        names = sorted(set.intersection(*map(set, [*own_gradients, *used_gradients])))
        nonzero = any(any(rank[name]) for rank in own_gradients for name in names)
        if len(groups) == 1 or not nonzero:
            continue
        if "DeepSpeed" not in reports[0]["wrappers"]:  # its gradients are full ones
            used_gradients = add_shards(used_gradients, [reports[rank]["shards"] for rank in ranks])
        sample_counts = [sum(map(len, step["samples"])) for step in rank_steps]
        kind, details = classify_gradients(
            own_gradients, used_gradients, names, tolerance, sample_counts, ranks)
        if kind == "twice" and rank_steps[0]["micro_batches"] == len(rank_steps):
            kind = "scaled"  # a mean over as many micro-batches as ranks
        loss_divided = loss_divided or is_loss_divided(rank_steps)
        kinds_by_tensors.setdefault((ranks, *names), []).append((number, kind, details))

    for steps in kinds_by_tensors.values():
        one_kind = len({kind for _, kind, _ in steps}) == 1
        for number, kind, details in steps:
            if kind in ("sum", "twice") and not one_kind:
                kind = "scaled"  # clipping: a mistake gives the same factor in each step
            if kind == "sum" and loss_divided:
                kind = "mean"
            since = f"since step {number}"
            findings.setdefault(kind, f"{details}, {since}" if details else since)
    own = sorted({name for (_, *names), steps in kinds_by_tensors.items()
                  for _, kind, _ in steps if kind == "own gradients" for name in names})
    if own and findings.keys() & {"mean", "sum", "scaled", "shared"}:
        total = {name for _, *names in kinds_by_tensors for name in names}
        findings["part"] = f"{len(own)} of {plural(len(total), 'tensor')}, such as {own[0]}"
        del findings["own gradients"]
    if "shared" in findings:
        add_note(findings, "the gradients are the same on all ranks, but not the mean of the "
                 "ranks' own: right if they were changed after averaging, wrong if before "
                 "(clipping of each micro-batch)")
    if "mean" in findings and loss_divided and reports[0]["wrappers"]:
        add_note(findings, "the loss seems to be divided by the number of ranks (times "
                 "micro-batches), or of all ranks' samples: if that is for the average over the "
                 "ranks, the wrapper averages again, and the gradients are too small")
    if comm_hook and "other gradients" in findings:  # such as PowerSGD
        add_note(findings, f"DDP's hook {comm_hook} changes the gradients: not compared")
        del findings["other gradients"]
    texts = {"mean": "the mean of the ranks' own", "scaled": "their mean times a factor",
             "own gradients": "each rank's own", "sum": "the sum of the ranks' own",
             "shared": "the same on all ranks, changed after they were averaged"}
    kinds = listed(texts.get(kind, kind) for kind in findings if kind != "note")
    if not kinds and len(groups) == 1:
        kinds = "averaged over no ranks: all share one batch"
    return [("gradients the optimizer uses", kinds or "not seen")], findings


def compare_own_gradients(reports):
    """Return whether all ranks' own gradients are equal in each step: {optimizer: True or False}.

    If so, the samples are equal, too. The gradients of all parameters must have been seen.
    """
    is_equal = {}  # {optimizer: True if equal in each step}
    ranks = [group[0] for group in find_tensor_groups(reports)]
    if len(ranks) == 1:
        return {}
    for _, rank_steps in pair_steps(reports):
        gradients = [rank_steps[rank]["own_gradients"] for rank in ranks]
        names = sorted(set.intersection(*map(set, gradients)))
        parameters = {name.split(", ")[0] for name in names}  # without ", real" and ", imaginary"
        complete = len(parameters) >= len(rank_steps[0]["state"])
        vectors = [concatenate(rank, names) for rank in gradients]
        equal = complete and any(vectors[0]) and all_close(vectors, 1e-5)
        optimizer = rank_steps[0]["optimizer"]
        is_equal[optimizer] = equal and is_equal.get(optimizer, True)
    return is_equal


# Data.

def judge_loader(loaders):
    """Return (a line's text or "", findings) for one DataLoader, given its facts on each rank."""
    world_size = len(loaders)
    findings = {}
    first = loaders[0]
    batches = [loader["batches"] for loader in loaders]
    epochs = [loader["epochs"][0] if loader["epochs"] else [] for loader in loaders]
    no_replacement = all(loader["without_replacement"] for loader in loaders)
    checksums = {loader["dataset_checksum"] for loader in loaders}
    if all(epochs) and len(checksums) == 1 and first["dataset_checksum"]:
        common = set.intersection(*map(set, epochs))
        rank_counts = Counter(index for epoch in epochs for index in set(epoch))
        shared = sum(count > 1 for count in rank_counts.values())
        drawn = [len(set(epoch)) for epoch in epochs]
        # A DistributedSampler repeats samples, so that all ranks get equally many
        padding = max(2 * world_size, sum(drawn) - first["dataset_size"])
        text = (f"{listed(sorted(set(drawn)))} samples drawn on each rank, "
                f"{shared} of them on more than one")
        same_batches = judge_samples(batches, "drawn")[1]
        if world_size == 1:
            text = f"{drawn[0]} samples drawn on each rank"
        elif min(drawn) == len(common) > 1 and (no_replacement or same_batches):
            findings["same data"] = f"samples {listed(sorted(common)[:4])}, ... on each rank"
        elif shared > padding and no_replacement:
            findings["overlap"] = f"{shared} of {sum(drawn)} drawn samples"
        elif shared > padding:
            add_note(findings, f"{shared} samples were drawn on several ranks: right if "
                     "the sampler does so on purpose, such as one with replacement")
    else:  # a stream, or different data sets, whose indices mean nothing
        text, findings = judge_samples(batches, "drawn")
        if world_size == 1:
            findings = {}
        shared = count_common(batches) if no_replacement and not findings else 0
        if shared > max(2 * world_size, first["dataset_size"] // 1000):
            findings["overlap"] = f"{shared} of the samples that each rank has drawn"
    for loader in loaders:
        num_replicas = loader.get("num_replicas", world_size)
        if num_replicas > world_size or (num_replicas < world_size and findings):
            findings["sampler"] = f"num_replicas={num_replicas}, but {world_size} share the data"
    shuffled = [(epoch, is_set) for epoch, is_set in zip(first["epochs"], first["are set"])
                if len(epoch) > 2 and first.get("shuffle")]
    for (epoch, is_set), (other, is_other_set) in combinations(shuffled, 2):
        if epoch[:len(other)] == other[:len(epoch)] and is_set == is_other_set:
            findings["order"] = "a DistributedSampler's"  # not a probe before the first epoch
    if len(shuffled) == 1 and not shuffled[0][1] and world_size > 1:
        add_note(findings, "set_epoch() was not called before the one epoch that was seen: without "
                 "it, all epochs have the same order")
    return text, findings


def count_common(batches):
    """Return the number of samples that all ranks have, or 0 if samples repeat on a rank."""
    ranks = [[sample for batch in rank for sample in batch] for rank in batches]
    if any(len(set(rank)) < len(rank) for rank in ranks):
        return 0
    return len(set.intersection(*map(set, ranks)))


def judge_samples(batches, verb):
    """Return (a line's text or "", findings) for the checksums of the ranks' samples."""
    counts = [Counter(sample for batch in rank for sample in batch) for rank in batches]
    if not all(counts):
        return "", {}
    common = counts[0]
    for count in counts[1:]:
        common = common & count
    totals = [sum(count.values()) for count in counts]
    shared = sum(common.values())
    # Samples that repeat on a rank may be on several ranks by chance: compare whole batches
    distinct = min(len(count) / total for count, total in zip(counts, totals)) > 0.9
    same = shared > min(totals) / 2 if distinct else len(set(map(str, batches))) == 1
    details = f"{shared} of the {min(totals)} samples {verb}"
    text = f"{listed(sorted(set(totals)))} samples {verb} on each rank, {shared} on all"
    return text, {"same data": details} if same else {}


def judge_seeds(loaders, replicas):
    """Return the finding of DistributedSamplers of one data set that shuffle differently."""
    samplers = {(loader["dataset_checksum"], loader.get("num_replicas")) for loader in loaders}
    if samplers != {(loaders[0]["dataset_checksum"], replicas)}:
        return {}
    for epoch, seeds in enumerate(zip(*(loader["seeds"] for loader in loaders)), 1):
        if len(set(seeds)) > 1:
            return {"sampler": f"in epoch {epoch} they shuffle with seed + epoch = {listed(seeds)} "
                    f"on ranks 0 to {len(seeds) - 1}, so that some samples are drawn on several "
                    "ranks, and others on none"}
    return {}


def differ_in_group(loaders, groups):
    """Return a tensor-parallel group whose ranks drew different batches from a loader, or []."""
    for group in groups:
        batches = [loaders[rank]["batches"] for rank in group]
        if any(len(set(map(str, rank_batches))) > 1 for rank_batches in zip(*batches)):
            return group
    return []


def judge_data(reports):
    """Return the lines and findings of what loaders drew, or else of the models' inputs.

    The ranks of a tensor-parallel group share a batch: groups are compared as ranks are.
    """
    findings, text = {}, ""
    groups = find_tensor_groups(reports)
    for loaders in zip(*(report["loaders"] for report in reports)):
        loader_text, loader_findings = judge_loader([loaders[group[0]] for group in groups])
        text = text or loader_text
        group = differ_in_group(loaders, groups)
        if group:
            findings["unequal data"] = f"ranks {listed(group)}"
        findings = judge_seeds(loaders, len(groups)) | loader_findings | findings
    same_inputs = ""
    if not text:
        batches = [[batch for step in reports[group[0]]["steps"] for batch in step["samples"]]
                   for group in groups]
        text, input_findings = judge_samples(batches, "given to the models")
        same_inputs = input_findings.get("same data", "") if len(groups) > 1 else ""
    is_equal = compare_own_gradients(reports)
    optimizers = [optimizer for optimizer, equal in is_equal.items() if equal]
    details = f"the ranks' own gradients of {listed(optimizers)} are equal"
    drawn = [optimizer for optimizer in optimizers if has_same_inputs(reports, groups, optimizer)]
    if drawn and not all(is_equal.values()):
        findings.setdefault("same data", f"{details}, and so are its models' inputs")
    elif optimizers and text and not same_inputs and not all(is_equal.values()):
        add_note(findings, f"{details}: right if this loss depends on no data and no noise")
    elif optimizers:
        if same_inputs:
            details = f"{same_inputs}; {details}"
        findings.setdefault("same data", details)
    elif same_inputs:
        add_note(findings, f"{same_inputs} are the same on all ranks, and no equal gradients were "
                 "seen: labels or dropout may differ")
    if not text:
        add_note(findings, "without a DataLoader, and without tensors or lists among a model's "
                 "arguments, agree cannot tell whether the ranks share samples")
    if len(groups) < len(reports):
        text = text.replace("on each rank", "for each group").replace("than one", "than one group")
    return [("data", text or "no DataLoader, no batch: not seen")], findings


def has_same_inputs(reports, groups, optimizer):
    """Return True if an optimizer's models got the same inputs on all ranks, in each step."""
    inputs = [[step["samples"] for step in reports[group[0]]["steps"]
               if step["optimizer"] == optimizer] for group in groups]
    return all(inputs[0]) and inputs.count(inputs[0]) == len(inputs)


# All.

def judge_devices(reports):
    """Return the lines and findings of the ranks' devices."""
    findings = {}
    gpus = Counter(report["gpu"] for report in reports if report["gpu"])
    for gpu, ranks in gpus.items():
        if ranks > 1:
            findings["one GPU"] = f"{ranks} on {gpu}"
    return [("devices", listed(sorted({report["device"] for report in reports})))], findings


def judge(reports: list[dict]) -> tuple[Lines, Findings]:
    """Return the lines and findings of the reports of all ranks, in their order."""
    lines, findings, notes = [], {}, []
    counts = [len(report["steps"]) for report in reports]
    ends = [report["end"] for report in reports if len(report["steps"]) == min(counts)]
    if len(set(counts)) > 1 and "ended" in ends:
        findings["steps"] = f"{listed(counts)} on ranks 0 to {len(counts) - 1}"
    for judge_part in judge_groups, judge_weights, judge_gradients, judge_data, judge_devices:
        part_lines, part_findings = judge_part(reports)
        if "note" in part_findings:
            notes.append(part_findings.pop("note"))
        lines += part_lines
        findings |= part_findings
    findings = {key: details for key, details in findings.items() if key in SYMPTOMS}
    source = find_source_of_weights(reports)
    if "own gradients" in findings and source is not None:
        findings["one rank's"] = f"after a step, rank {source}'s weights replace the others'"
        del findings["own gradients"]
    elif "own gradients" in findings and "ZeroRedundancyOptimizer" in reports[0]["wrappers"]:
        findings["own gradients"] += ("; ZeroRedundancyOptimizer makes the weights equal: each "
                                      "tensor learns from the samples of one rank")
    elif "own gradients" in findings and not findings.keys() & {"weights", "apart"}:
        notes.append("each optimizer uses its rank's own gradients, and the weights are equal "
                     "before each step: they are averaged instead, or the samples are the same")
        del findings["own gradients"]
    for name in sorted(intended_if_model_parallel(reports) & findings.keys()):
        notes.append(f"{name} ({findings.pop(name)}), which may be intended: each rank has a part "
                     "of the model")
    if "FSDP1" in reports[0]["wrappers"]:
        notes.append("FullyShardedDataParallel: weights and gradients were not compared")
    communicates = any(report[key] for report in reports
                       for key in ("process_group", "horovod", "wrappers", "mpi"))
    if not communicates and findings.keys() & {"own gradients", "same data"}:
        findings["alone"] = "no process group of torch.distributed, no Horovod"
    notes += {f"not seen: {hook}, because of {problem}": None
              for report in reports for hook, problem in report["failed_hooks"].items()}
    shown = {key: details for key, details in findings.items()
             if not CAUSES.get(key, set()) & findings.keys()}
    if notes:
        shown["note"] = "; ".join(notes)
    return lines, shown


def intended_if_model_parallel(reports):
    """Return the findings that are not mistakes if each rank has a part of one model."""
    first = reports[0]
    data = {"same data", "overlap", "unequal data"}
    if any(name.startswith("all_to_all") for name in first["calls"]):
        return data | {"weights", "apart", "part"}  # experts, or tables of embeddings
    if len(find_tensor_groups(reports)) < len(reports):
        return set()
    is_sharded = any(first["shards"].values()) and not first["wrappers"]
    return data if is_sharded or any(report["tensor_group"] for report in reports) else set()


def judge_hang(states: list[tuple[dict, dict]], seconds: float) -> tuple[Lines, Findings]:
    """Return the table lines and findings for ranks that hang.

    states: (report or None, last published status or None) of each rank.
    """
    lines = []
    calls = []
    for rank, (report, status) in enumerate(states):
        stack = status["stack"] if status else ["the start"]
        place = "the end" if report else " < ".join(stack)
        calls.append("" if report or not status else status["call"])
        lines.append((f"rank {rank}", f"at {place}"))
    if len(set(calls)) > 1 and not set(calls) <= {"", "barrier"}:
        details = [f"rank {rank} in {call}, {states[rank][1]['stack'][0]}"
                 for rank, call in enumerate(calls) if call]
        return lines, {"sequence": f"{listed(details)}; the others are not there"}
    return lines, {"hang": f"for {seconds:.0f} s, at the lines above"}


def judge_calls(calls: list[list[str]]) -> tuple[Lines, Findings]:
    """Return the table lines and findings for ranks whose next calls, (call, place), differ."""
    lines = [(f"rank {rank}", f"{call}, at {place}") for rank, (call, place) in enumerate(calls)]
    return lines, {"sequence": listed(sorted({call for call, _ in calls}))}


def describe_without_steps(reports: list[dict]) -> str:
    """Return what was seen of a training without an optimizer step, as text."""
    changed = any(report["first_state"][name] != state
                  for report in reports for name, state in report["last_state"].items()
                  if name in report["first_state"])
    if not any(report["backwards"] for report in reports):
        return "no backward pass was seen"
    counts = [len(report["steps"]) for report in reports]
    if any(counts):
        return f"{listed(counts)} steps on ranks 0 to {len(counts) - 1}"
    if not changed:
        return "no weight changed"
    last_states = [report["last_state"] for report in reports]
    differences = find_differences(last_states, [report["shards"] for report in reports])
    if not differences:
        return "the weights changed without one, and are equal on all ranks"
    text = describe_differences(differences, len(last_states[0]))
    return f"the weights changed without one, and are apart: {text}"


# Output.

def show(script: str, reports: list[dict], lines: Lines, findings: Findings) -> str:
    """Print the table, a line per finding, and the verdict; return the verdict."""
    note = findings.pop("note", "")
    if all(reports):
        nodes = plural(len({report["host"] for report in reports}), "node")
        steps = plural(len({number for number, _ in pair_steps(reports)}), "step")
        wrappers = listed(reports[0]["wrappers"]) or "no known wrapper"
        tensors = {name for step in reports[0]["steps"] for name in step["state"]}
        say(f"{script}: {plural(len(reports), 'rank')} on {nodes}, {steps}; {wrappers}; "
              f"{plural(len(tensors), 'tensor')}")
    for title, text in lines:
        say(f"  {title:30} {text}")
    if note:
        say(f"note: {note}")
    for key, details in findings.items():
        fix = find_fix(key, reports[0])
        say(f"WRONG: {key}: {SYMPTOMS[key]} ({details}). To do: {fix}")
    if findings:
        verdict = f"wrong: {listed(sorted(findings))}"
    else:
        is_seen = not any(report["failed_hooks"] or "FSDP1" in report["wrappers"]
                          for report in reports)
        verdict = NOTHING_WRONG if is_seen else NOT_CHECKED
    say(f"verdict: {verdict}", flush=True)
    return verdict
