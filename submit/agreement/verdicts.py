"""Judges the reports of all ranks: returns the lines of agree.py's table, and findings."""

import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from statistics import median

from .messages import FIXES, SYMPTOMS

SAME = 1e-3  # of gradients: rounding of fp32, another order of summation; mistakes exceed 0.1
SAME_HALF = 3e-2  # if gradients have 8 or 11 bits
FACTOR = 0.02  # relative tolerance of a factor: 1, the number of ranks, or its inverse
ROUNDING_OF_ALL = 1e-6  # a tensor's gradient below this share of the largest counts as 0
ROUNDING = 1e-3  # a difference of weights, relative to how far they moved

say = partial(print, file=sys.__stdout__)  # even if the script redirects sys.stdout

FOLLOWS = {  # {a finding: its possible causes; with one of them it is not shown}
    "weights": {"alone"},
    "apart": {"alone", "own gradients", "part", "one rank's", "other gradients", "not finite"},
    "own gradients": {"alone"},
    "same data": {"alone", "sampler"},
    "overlap": {"alone", "sampler"},
    "nothing trains": {"not finite"},
}

Findings = dict[str, str]  # {name of a finding, or "note": details}
Lines = list[tuple[str, str]]  # (what was looked at, what was seen)


def listed(values: Iterable) -> str:
    return ", ".join(map(str, values))


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def add_note(findings: Findings, text: str) -> None:
    findings["note"] = f"{findings['note']}; {text}" if "note" in findings else text


# Steps: step k of an optimizer is compared with step k of the same optimizer on other ranks.

def paired(reports: list[dict]) -> list[tuple[int, list[dict]]]:
    """Return (step number, the step on each rank) for all steps that all ranks have taken."""
    ranks = []
    for report in reports:
        steps, counts = {}, Counter()
        for step in report["steps"]:
            counts[step["optimizer"]] += 1
            steps[step["optimizer"], counts[step["optimizer"]]] = step
        ranks.append(steps)
    return [(key[1], [steps[key] for steps in ranks]) for key in ranks[0]
            if all(key in steps for steps in ranks)]


# Weights: a state is {name: [checksum, *projections]}.

def distance(states, start):
    """Return how far the ranks' projections are apart, relative to how far they have moved.

    Without a start, it is relative to their size.
    """
    size = apart = 0
    for name in states[0].keys() & (start or states[0]).keys():
        columns = zip(*(state[name][1:] for state in states))
        origin = start[name][1:] if start else [0.0] * len(states[0][name][1:])
        for values, zero in zip(columns, origin):
            apart += (max(values) - min(values)) ** 2
            size += max((value - zero) ** 2 for value in values)
    if size:
        return (apart / size) ** 0.5
    return 0.0 if apart == 0 else float("inf")


def differing(states, shards):
    """Return {name: ranks that differ from the majority} of the parameters that differ."""
    names = {}
    for name in sorted(set.intersection(*map(set, states)) - set(shards)):
        values = [state[name][0] for state in states]
        if len(set(values)) > 1:
            usual, times = Counter(values).most_common(1)[0]
            others = [rank for rank, value in enumerate(values) if value != usual]
            names[name] = others if times > 1 else list(range(len(values)))
    return names


def words_of(names, total):
    name, ranks = next(iter(names.items()))
    return f"{len(names)} of {plural(total, 'tensor')}, such as {name}, on rank {listed(ranks)}"


def judge_weights(reports):
    """Return the lines and findings of the parameters, before each step and at the end."""
    shards = reports[0]["shards"]
    findings = {}
    last = [report["last"] for report in reports]
    steps = paired(reports)
    trained = {name for _, ranks in steps for name in ranks[0]["state"]}
    last = [{name: state[name] for name in trained & state.keys()} for state in last]
    compared = [name for name in last[0] if name not in shards]
    start = {}  # {name: state before its first step} on rank 0
    history = []  # (step number, what differs before it by more than rounding)
    for number, ranks in [*steps, (None, None)]:
        states = [step["state"] for step in ranks] if ranks else last
        names = differing(states, shards)
        start = states[0] | start
        beginning = {} if number == 1 else start
        limit = 1e-6 if number == 1 else ROUNDING
        if names and distance([{name: state[name] for name in names} for state in states],
                              beginning) < limit:
            names = {}
        history.append((number, names))

    at_start = next((names for number, names in history if number == 1 and names), {})
    at_end = history[-1][1]
    seen = len({number for number, _ in steps})
    if at_end and at_start:
        findings["weights"] = f"before step 1, {words_of(at_start, len(compared))}"
    elif at_end:
        unchanged_steps = [number for number, names in history if number and not names]
        findings["apart"] = f"since step {max(unchanged_steps, default=1)}"
    elif at_start:
        add_note(findings, "the weights differed before step 1, and are equal after the last")
    moved = any(report["last"][name][0] != step["state"][name][0]
                for report in reports for step in report["steps"]
                for name in step["state"].keys() & report["last"].keys())
    if trained and not moved:
        findings["nothing trains"] = why_nothing_trains(reports, seen)

    text = "equal" if compared else "not compared"
    sharded = [name for name in trained if name in shards]
    if sharded:
        text += f"; {plural(len(sharded), 'tensor')} of which each rank has another shard"
    start_text = words_of(at_start, len(compared)) if at_start else text
    end_text = words_of(at_end, len(compared)) if at_end else text
    return [("weights before step 1", start_text),
            (f"weights after {plural(seen, 'step')}", end_text)], findings


def why_nothing_trains(reports, seen):
    """Return why the steps may have changed no weight."""
    step = reports[0]["steps"][-1]
    details = f"in {plural(seen, 'step')}"
    if step["without gradient"] and not step["final"]:
        return (f"{details}; {plural(step['without gradient'], 'parameter')} of the optimizer "
                "have no gradient, other tensors have one")
    gradients = [number for values in step["final"].values() for number in values]
    if gradients and not any(gradients):
        return f"{details}; all gradients are 0"
    if not step["rate"]:
        return f"{details}; the learning rate is 0"
    return details


# Gradients: projections are linear: those of a mean are the mean of the ranks' projections.

def vector(gradients, names):
    return [number for name in names for number in gradients[name]]


def mean_of(vectors):
    return [sum(column) / len(vectors) for column in zip(*vectors)]


def size_of(values):
    return sum(value * value for value in values) ** 0.5


def finite(values):
    return all(abs(value) < float("inf") for value in values)


def scale_and_residual(values, base):
    """Return the factor that fits `values` to `base`, and the relative size of what remains."""
    square = sum(b * b for b in base)
    factor = sum(a * b for a, b in zip(values, base)) / square if square else 0.0
    residual = size_of([a - factor * b for a, b in zip(values, base)])
    size = size_of(values)
    return factor, residual / size if size else 0.0


def all_close(vectors, tolerance):
    """Return True if all ranks' vectors are equal, within a tolerance relative to their size."""
    size = max(map(size_of, vectors))
    return all(size_of([a - b for a, b in zip(values, vectors[0])]) <= tolerance * size
               for values in vectors)


def is_own_gradient_scaled(after, before, tolerance):
    """Return True if each rank uses its own gradient, times a factor (such as of clipping)."""
    return all(scale_and_residual(values, own)[1] < tolerance
               for values, own in zip(after, before))


def with_full_gradients(after_reduction, names):
    """Return the ranks' gradients with shards replaced by full gradients, the sum of the shards."""
    sums = {name: [sum(column) for column in zip(*(rank[name] for rank in after_reduction))]
            for name in names}
    return [rank | sums for rank in after_reduction]


def classify_gradients(before_reduction, after_reduction, names, tolerance, sample_counts):
    """Return (a finding, "mean", "scaled" or "shared"; details) for the gradients of a step."""
    sizes = {name: max(size_of(rank[name]) for rank in before_reduction) for name in names}
    names = [name for name in names if sizes[name] > ROUNDING_OF_ALL * max(sizes.values())]
    before = [vector(rank, names) for rank in before_reduction]
    after = [vector(rank, names) for rank in after_reduction]
    world_size, mean = len(before), mean_of(before)
    fits = [scale_and_residual(values, mean) for values in after]
    if all(residual < tolerance for _, residual in fits):
        factors = [factor for factor, _ in fits]
        if max(factors) - min(factors) < FACTOR * max(map(abs, factors)):
            return classify_factor(median(factors), world_size)
        if not is_own_gradient_scaled(after, before, tolerance):
            return "other gradients", f"the mean times {listed(f'{f:.4g}' for f in factors)}"
    for rank in range(world_size):
        if all(all_close([values, before[rank]], tolerance) for values in after):
            return "one rank's", f"those of rank {rank}"
    if is_own_gradient_scaled(after, before, tolerance):
        return "own gradients", ""
    kinds = {name: classify_tensor(before_reduction, after_reduction, name, tolerance)
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
    weights = mixing_weights(after[0], before, tolerance) if len(mean) > world_size else []
    if weights and max(weights) - min(weights) > FACTOR * max(map(abs, weights)):
        return classify_weights(weights, sample_counts)
    return "shared", ""


def classify_weights(weights, sample_counts):
    """Return (kind, details) for a weighted mean: is it weighted by the ranks' samples?"""
    expected = [0] * len(weights)
    if all(sample_counts):
        expected = [count / sum(sample_counts) for count in sample_counts]
    shift = [weight / sum(weights) - share for weight, share in zip(weights, expected)]
    if max(map(abs, shift)) > FACTOR:
        factors = listed(f"{weight * len(weights):.3g}" for weight in weights)
        return "other gradients", f"the mean of the ranks' own times {factors}"
    return "mean", "weighted by the ranks' samples"


def classify_tensor(before_reduction, after_reduction, name, tolerance):
    """Return "shared", "own", "lost" (half of a complex gradient) or "other" for one tensor."""
    before = [rank[name] for rank in before_reduction]
    after = [rank[name] for rank in after_reduction]
    if all_close(after, tolerance):
        is_half = name.endswith((", real", ", imaginary"))
        if is_half and not any(map(size_of, after)) and all(map(size_of, before)):
            return "lost"
        return "shared"
    return "own" if is_own_gradient_scaled(after, before, tolerance) else "other"


def mixing_weights(after, before, tolerance):
    """Return the weights with which `after` is a sum of the ranks' own gradients, or []."""
    import numpy
    base = numpy.array(before).T
    weights = numpy.linalg.lstsq(base, numpy.array(after), rcond=None)[0]
    residual = size_of(base @ weights - after)
    return weights.tolist() if residual < tolerance * size_of(after) else []


def classify_factor(factor, world_size):
    """Return (kind, details) if every rank uses the mean gradient times this factor."""
    for kind, expected in ("mean", 1), ("sum", world_size), ("twice", 1 / world_size):
        if abs(factor - expected) < FACTOR * expected:
            return kind, f"the mean times {factor:.3g}"
    return "scaled", f"the mean times {factor:.4g}"


def divided_by_all(ranks):
    """Return True if the losses were divided by the world size or all ranks' samples."""
    samples = sum(len(batch) for step in ranks for batch in step["given"])
    expected = {len(ranks) * ranks[0]["backwards"], samples}
    return any(abs(number - all_ranks) < FACTOR * all_ranks
               for number in ranks[0]["divisors"] for all_ranks in expected if all_ranks)


def not_finite(ranks):
    """Return which ranks have non-finite gradients, before or after the averaging, as text."""
    for key, owner in ("local", "of its own"), ("final", "after the averaging"):
        bad = [rank for rank, step in enumerate(ranks)
               if not finite(vector(step[key], step[key]))]
        if bad:
            return f"on rank {listed(bad)}, {owner}"
    return ""


def judge_gradients(reports):
    """Return the lines and findings of the gradients in each step."""
    hook = reports[0]["hook"]
    tolerance = SAME_HALF if hook or any(report["half"] for report in reports) else SAME
    parts = {name for name, is_sum in reports[0]["shards"].items() if is_sum}
    kinds_of = {}  # {names of a step's tensors: [(step number, kind, details)]}
    findings, divided = {}, False
    for number, ranks in paired(reports):
        details = not_finite(ranks)
        if details:
            findings.setdefault("not finite", f"{details}, since step {number}")
            continue
        names = sorted(set.intersection(
            *(set(step[key]) for step in ranks for key in ("local", "final"))))
        if not any(any(step["local"][name]) for step in ranks for name in names):
            continue
        before_reduction = [step["local"] for step in ranks]
        after_reduction = with_full_gradients([step["final"] for step in ranks],
                                              parts & set(names))
        sample_counts = [sum(map(len, step["given"])) for step in ranks]
        kind, details = classify_gradients(
            before_reduction, after_reduction, names, tolerance, sample_counts)
        if kind == "twice" and ranks[0]["backwards"] == len(ranks):
            kind = "scaled"  # a mean over as many micro-batches as ranks
        divided = divided or divided_by_all(ranks)
        kinds_of.setdefault(tuple(names), []).append((number, kind, details))

    for steps in kinds_of.values():
        always = len({kind for _, kind, _ in steps}) == 1
        for number, kind, details in steps:
            if kind in ("sum", "twice") and not always:
                kind = "scaled"  # clipping: a mistake gives the same factor in each step
            if kind == "sum" and divided:
                kind = "mean"
            details = ", ".join(filter(None, [details, f"since step {number}"]))
            findings.setdefault(kind, details)
    if "mean" in findings and divided and reports[0]["wrappers"]:
        add_note(findings, "the loss was divided by the number of ranks, and its gradients are "
                 "averaged: unless that was for micro-batches, they are too small")
    if hook and "other gradients" in findings:  # such as PowerSGD
        add_note(findings, f"DDP's hook {hook} changes the gradients: not compared")
        del findings["other gradients"]
    text = {"mean": "the mean of the ranks' own", "scaled": "their mean times a factor",
            "own gradients": "each rank's own", "sum": "the sum of the ranks' own",
            "shared": "the same on all ranks, changed after they were averaged"}
    seen = listed(text.get(kind, kind) for kind in findings if kind != "note") or "not seen"
    return [("gradients the optimizer uses", seen)], findings


def equal_own_gradients(reports):
    """Return the optimizers with equal gradients on all ranks in each step, so equal samples.

    An optimizer with a parameter whose gradient was not seen is not among them.
    """
    equal_in = {}  # {optimizer: True if so in each step}
    for _, ranks in paired(reports):
        gradients = [step["local"] for step in ranks]
        names = sorted(set.intersection(*map(set, gradients)))
        missing = len({name.split(", ")[0] for name in names}) < len(ranks[0]["state"])
        vectors = [vector(rank, names) for rank in gradients]
        same = not missing and any(vectors[0]) and all_close(vectors, 1e-5)
        optimizer = ranks[0]["optimizer"]
        equal_in[optimizer] = same and equal_in.get(optimizer, True)
    return [optimizer for optimizer, same in equal_in.items() if same]


# Data.

def judge_loader(loaders):
    """Return (what was seen or "", findings) for one DataLoader, given its facts on each rank."""
    world_size = len(loaders)
    findings = {}
    first = loaders[0]
    epochs = [loader["epochs"][0] if loader["epochs"] else [] for loader in loaders]
    partitioned = all(loader["dealt"] for loader in loaders)
    alike = first["like"] and len({loader["like"] for loader in loaders}) == 1
    if all(epochs) and alike:
        common = set.intersection(*map(set, epochs))
        counts = Counter(number for epoch in epochs for number in set(epoch))
        several = [number for number, times in counts.items() if times > 1]
        drawn = [len(set(epoch)) for epoch in epochs]
        padding = max(2 * world_size, sum(drawn) - first["items"])  # repeats: equal shares
        seen = f"{listed(sorted(set(drawn)))} samples drawn on each rank, {len(several)} on several"
        same = judge_samples([loader["batches"] for loader in loaders], "drawn")[1]
        if min(drawn) == len(common) > 1 and (partitioned or same):
            findings["same data"] = f"samples {listed(sorted(common)[:4])}, ... on each rank"
        elif len(several) > padding and partitioned:
            findings["overlap"] = f"{len(several)} of {sum(drawn)} drawn samples"
        elif len(several) > padding:
            add_note(findings, f"{len(several)} samples were drawn on several ranks: right if "
                     "the sampler is meant to, such as one with replacement")
    else:  # a stream, or different data sets, whose indices mean nothing
        batches = [loader["batches"] for loader in loaders]
        seen, findings = judge_samples(batches, "drawn")
        several = common_samples(batches) if partitioned and not findings else 0
        if several > max(2 * world_size, first["items"] // 1000):
            findings["overlap"] = f"{several} of the samples that each rank has drawn"
    for loader in loaders:
        if loader.get("ranks", world_size) != world_size and (
                findings or loader["ranks"] > world_size):
            findings["sampler"] = f"num_replicas={loader['ranks']}, world size {world_size}"
    shuffled = [epoch for epoch in first["epochs"] if len(epoch) > 2 and first.get("shuffle")]
    if any(one[:len(other)] == other[:len(one)]
           for index, one in enumerate(shuffled) for other in shuffled[:index]):
        findings["order"] = "a DistributedSampler's"
    return seen, findings


def common_samples(batches):
    """Return how many samples all ranks have; 0 if one has a sample twice: the data repeat."""
    ranks = [[sample for batch in rank for sample in batch] for rank in batches]
    if any(len(set(rank)) < len(rank) for rank in ranks):
        return 0
    return len(set.intersection(*map(set, ranks)))


def judge_samples(batches, verb):
    """Return (what was seen or "", findings) for the checksums of the ranks' samples."""
    counts = [Counter(sample for batch in rank for sample in batch) for rank in batches]
    if not all(counts):
        return "", {}
    common = counts[0]
    for count in counts[1:]:
        common = common & count
    totals = [sum(count.values()) for count in counts]
    shared = sum(common.values())
    # If samples repeat on a rank, few are distinct, and ranks share some by chance.
    distinct = min(len(count) / total for count, total in zip(counts, totals)) > 0.9
    same = shared > min(totals) / 2 if distinct else len(set(map(str, batches))) == 1
    details = f"{shared} of the {min(totals)} samples {verb}"
    seen = (f"{listed(sorted(set(totals)))} samples {verb} on each rank, {shared} on all")
    return seen, {"same data": details} if same else {}


def judge_data(reports):
    """Return the lines and findings of what loaders drew, or else of what models were given."""
    findings, seen = {}, ""
    for loaders in zip(*(report["loaders"] for report in reports)):
        text, more = judge_loader(loaders)
        seen = seen or text
        findings = more | findings
    inputs = ""
    if not seen:
        given = [[batch for step in report["steps"] for batch in step["given"]]
                 for report in reports]
        seen, more = judge_samples(given, "given to the models")
        inputs = more.get("same data", "")
    optimizers = equal_own_gradients(reports)
    if optimizers:
        equal_gradients = f"the ranks' own gradients of {listed(optimizers)} are equal"
        findings.setdefault("same data", "; ".join(filter(None, [inputs, equal_gradients])))
    elif inputs:
        add_note(findings, f"{inputs} are the same on all ranks, and no equal gradients were seen: "
                 "labels or dropout may differ")
    return [("data", seen or "no DataLoader, no batch: not seen")], findings


# All.

def judge_devices(reports):
    """Return the lines and findings of GPUs."""
    findings = {}
    places = Counter((report["host"], report["gpu"]) for report in reports if report["gpu"])
    for (host, gpu), ranks in places.items():
        if ranks > 1:
            findings["one GPU"] = f"{ranks} on {gpu} of {host}"
    return [("devices", listed(sorted({report["device"] for report in reports})))], findings


def judge(reports: list[dict]) -> tuple[Lines, Findings]:
    """Return the lines and findings of the reports of all ranks, in their order."""
    lines, findings, notes = [], {}, []
    steps = [len(report["steps"]) for report in reports]
    fewest = [report for report in reports if len(report["steps"]) == min(steps)]
    if len(set(steps)) > 1 and any(report["end"] == "ended" for report in fewest):
        findings["steps"] = f"{listed(steps)} on ranks 0 to {len(steps) - 1}"
    for judge_part in judge_weights, judge_gradients, judge_data, judge_devices:
        more_lines, more = judge_part(reports)
        if "note" in more:
            notes.append(more.pop("note"))
        lines += more_lines
        findings |= more
    findings = {key: details for key, details in findings.items() if key in SYMPTOMS}
    if "own gradients" in findings and not findings.keys() & {"weights", "apart"}:
        notes.append("each optimizer uses its rank's own gradients, and the weights are equal "
                     "before each step: they are averaged instead, or the samples are the same")
        del findings["own gradients"]
    for name in sorted(parallel_models(reports) & findings.keys()):
        notes.append(f"{name} ({findings.pop(name)}), which may be meant: the ranks share a model")
    communicates = any(report["group"] or report["horovod"] or report["wrappers"] or report["mpi"]
                       for report in reports)
    if not communicates and findings.keys() & {"own gradients", "same data"}:
        findings["alone"] = "no process group of torch.distributed, no Horovod"
    for report in reports[:1]:
        notes += [f"not seen: {hook}, because of {problem}"
                  for hook, problem in report["dropped"].items()]
    causes = {key: details for key, details in findings.items()
              if not FOLLOWS.get(key, set()) & findings.keys()}
    if notes:
        causes["note"] = "; ".join(notes)
    return lines, causes


def parallel_models(reports):
    """Return the findings that are not mistakes if each rank has a part of one model."""
    first = reports[0]
    data = {"same data", "overlap"}
    if any(name.startswith("all_to_all") for name in first["calls"]):
        return data | {"weights", "apart", "part"}  # experts, or tables of embeddings
    tensor_parallel = first["shards"] and not first["wrappers"]
    return data if tensor_parallel else set()


def judge_hang(states: list[tuple[dict, dict]], seconds: float) -> tuple[Lines, Findings]:
    """Return the table lines and findings for ranks that hang.

    states: (report or None, last published status or None) of each rank.
    """
    lines = []
    calls = []
    for rank, (report, alive) in enumerate(states):
        stack = alive["stack"] if alive else ["the start"]
        place = "the end" if report else " < ".join(stack)
        calls.append("" if report or not alive else alive["call"])
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


def without_steps(reports: list[dict]) -> str:
    """Return what was seen of a training without an optimizer step."""
    moved = any(report["first"].get(name) != state
                for report in reports for name, state in report["last"].items()
                if name in report["first"])
    if not any(report["backwards"] for report in reports):
        return "no backward pass was seen"
    if not moved:
        return "no weight changed"
    names = differing([report["last"] for report in reports], reports[0]["shards"])
    total = len(reports[0]["last"])
    state = f"apart: {words_of(names, total)}" if names else "equal on all ranks"
    return f"the weights changed without one, and are {state}"


# Output.

def show(script: str, reports: list[dict], lines: Lines, findings: Findings) -> None:
    """Print the table, a line per finding, and the verdict."""
    note = findings.pop("note", "")
    if all(reports):
        nodes = plural(len({report["host"] for report in reports}), "node")
        steps = plural(len({number for number, _ in paired(reports)}), "step")
        wrappers = listed(reports[0]["wrappers"]) or "no known wrapper"
        tensors = {name for step in reports[0]["steps"] for name in step["state"]}
        say(f"{script}: {plural(len(reports), 'rank')} on {nodes}, {steps}; {wrappers}; "
              f"{plural(len(tensors), 'tensor')}")
    for what, seen in lines:
        say(f"  {what:30} {seen}")
    if note:
        say(f"note: {note}")
    for key, details in findings.items():
        fix = next(text for applies, text in FIXES[key] if applies(reports))
        say(f"WRONG: {key}: {SYMPTOMS[key]} ({details}). To do: {fix}")
    verdict = f"wrong: {listed(sorted(findings))}" if findings else "nothing wrong was found"
    say(f"verdict: {verdict}", flush=True)
