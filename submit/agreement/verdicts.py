"""What agree.py concludes from what it saw of each rank: the lines of its table, and findings."""

import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from statistics import median

from .cures import CURES, SYMPTOMS

SAME = 1e-3  # of gradients: rounding of fp32, other orders of summation; mistakes exceed a tenth
SAME_HALF = 3e-2  # where gradients have 8 or 11 bits
FACTOR = 0.02  # how near a factor has to be to 1, to the number of ranks, or to one over that
ROUNDING_OF_ALL = 1e-6  # a tensor's gradient, compared with the largest: 0 but for rounding
ROUNDING = 1e-3  # a difference of weights, compared with how far they moved

say = partial(print, file=sys.__stdout__)  # whatever the script makes of print and stdout

FOLLOWS = {  # {a finding: others that bring it about; then it is not repeated}
    "weights": {"alone"},
    "apart": {"alone", "own gradients", "part", "one rank's", "other gradients", "not finite"},
    "own gradients": {"alone"},
    "same data": {"alone", "sampler"},
    "overlap": {"alone", "sampler"},
    "nothing trains": {"not finite"},
}

Findings = dict[str, str]  # {name of a finding, or "note": where it is}
Lines = list[tuple[str, str]]  # (what was looked at, what was seen)


def listed(values: Iterable) -> str:
    return ", ".join(map(str, values))


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def add_note(findings: Findings, text: str) -> None:
    findings["note"] = f"{findings['note']}; {text}" if "note" in findings else text


# Steps: number k of an optimizer is compared with number k of the other ranks' same optimizer.

def paired(reports: list[dict]) -> list[tuple[int, list[dict]]]:
    """Return (number of the step, the step on each rank) of all steps that all ranks made."""
    ranks = []
    for report in reports:
        steps, counts = {}, Counter()
        for step in report["steps"]:
            counts[step["optimizer"]] += 1
            steps[step["optimizer"], counts[step["optimizer"]]] = step
        ranks.append(steps)
    return [(key[1], [steps[key] for steps in ranks]) for key in ranks[0]
            if all(key in steps for steps in ranks)]


# Weights: a state is {name: (a checksum, and its projections)}.

def distance(states, start):
    """Return how far ranks' projections are apart, compared with how far they have moved.

    Without a start compare with their size.
    """
    size = apart = 0
    for name in states[0].keys() & (start or states[0]).keys():
        columns = zip(*(state[name][1:] for state in states))
        origin = start[name][1:] if start else [0.0] * len(states[0][name][1:])
        for values, zero in zip(columns, origin):
            apart += (max(values) - min(values)) ** 2
            size += max((value - zero) ** 2 for value in values)
    return (apart / size) ** 0.5 if size else 0.0 if apart == 0 else float("inf")


def differing(states, shards):
    """Return {name: the ranks that differ from most} of the parameters that differ."""
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
    shards, findings, last = reports[0]["shards"], {}, [report["last"] for report in reports]
    steps = paired(reports)
    trained = {name for _, ranks in steps for name in ranks[0]["state"]}
    last = [{name: state[name] for name in trained & state.keys()} for state in last]
    compared = [name for name in last[0] if name not in shards]
    start = {}  # {name: state before the first step} of each name, on rank 0
    history = []  # (number, what differs before this step and not by rounding)
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
        equal = [number for number, names in history if number and not names]
        findings["apart"] = f"since step {max(equal, default=1)}"
    elif at_start:
        add_note(findings, "the weights differed before step 1, and are equal after the last")
    moved = any(report["last"][name][0] != step["state"][name][0]
                for report in reports for step in report["steps"]
                for name in step["state"].keys() & report["last"].keys())
    if trained and not moved:
        findings["nothing trains"] = why_nothing_trains(reports, seen)

    equal = "equal" if compared else "not compared"
    sharded = [name for name in trained if name in shards]
    if sharded:
        equal += f"; {plural(len(sharded), 'tensor')} of which each rank has another shard"
    return [("weights before step 1", words_of(at_start, len(compared)) if at_start else equal),
            (f"weights after {plural(seen, 'step')}",
             words_of(at_end, len(compared)) if at_end else equal)], findings


def why_nothing_trains(reports, seen):
    """Return what was seen of steps that moved nothing."""
    step, where = reports[0]["steps"][-1], f"in {plural(seen, 'step')}"
    if step["without gradient"] and not step["final"]:
        return (f"{where}; {plural(step['without gradient'], 'parameter')} of the optimizer "
                "without a gradient, other tensors have them")
    gradients = [number for values in step["final"].values() for number in values]
    if gradients and not any(gradients):
        return f"{where}; all gradients are 0"
    if not step["rate"]:
        return f"{where}; the learning rate is 0"
    return where


# Gradients: projections are linear, so those of a mean are the mean of those of its parts.

def vector(gradients, names):
    return [number for name in names for number in gradients[name]]


def mean_of(vectors):
    return [sum(column) / len(vectors) for column in zip(*vectors)]


def size_of(values):
    return sum(value * value for value in values) ** 0.5


def finite(values):
    return all(abs(value) < float("inf") for value in values)


def fit(values, base):
    """Return the factor s and what is left of `values` after s times `base`, relative to it."""
    square = sum(b * b for b in base)
    factor = sum(a * b for a, b in zip(values, base)) / square if square else 0.0
    left = size_of([a - factor * b for a, b in zip(values, base)])
    size = size_of(values)
    return factor, left / size if size else 0.0


def equal(vectors, tolerance):
    """Return True if all ranks' vectors are equal, within a share of their size."""
    size = max(map(size_of, vectors))
    return all(size_of([a - b for a, b in zip(values, vectors[0])]) <= tolerance * size
               for values in vectors)


def own_times_factors(final, local, tolerance):
    """Return True if each rank takes its own gradients, clipped or scaled or as they are."""
    return all(fit(values, own)[1] < tolerance for values, own in zip(final, local))


def whole(finals, names):
    """Return the ranks' final gradients with wholes in place of shards: the sum of the parts."""
    sums = {name: [sum(column) for column in zip(*(final[name] for final in finals))]
            for name in names}
    return [final | sums for final in finals]


def kind_of(locals_, finals, names, tolerance, given):
    """Return (a finding, "mean", "scaled" or "shared", where) of a step's gradients."""
    sizes = {name: max(size_of(gradients[name]) for gradients in locals_) for name in names}
    names = [name for name in names if sizes[name] > ROUNDING_OF_ALL * max(sizes.values())]
    local = [vector(gradients, names) for gradients in locals_]
    final = [vector(gradients, names) for gradients in finals]
    world_size, mean = len(local), mean_of(local)
    fits = [fit(values, mean) for values in final]
    if all(left < tolerance for _, left in fits):
        factors = [factor for factor, _ in fits]
        if max(factors) - min(factors) < FACTOR * max(map(abs, factors)):
            return kind_of_factor(median(factors), world_size)
        if not own_times_factors(final, local, tolerance):
            return "other gradients", f"the mean times {listed(f'{f:.4g}' for f in factors)}"
    for rank in range(world_size):
        if all(equal([values, local[rank]], tolerance) for values in final):
            return "one rank's", f"those of rank {rank}"
    if own_times_factors(final, local, tolerance):
        return "own gradients", ""
    kinds = {name: kind_of_tensor(locals_, finals, name, tolerance) for name in names}
    own = [name for name, kind in kinds.items() if kind == "own"]
    other = [name for name, kind in kinds.items() if kind == "other"]
    lost = [name for name, kind in kinds.items() if kind == "lost"]
    if own and not other:
        return "part", f"{len(own)} of {plural(len(names), 'tensor')}, such as {own[0]}"
    if other or own:
        return "other gradients", f"they differ by rank, such as {(other or own)[0]}"
    if lost:
        return "other gradients", f"{lost[0]}: it is 0 where the ranks' own are not"
    shares = shares_of(final[0], local, tolerance) if len(mean) > world_size else []
    if shares and max(shares) - min(shares) > FACTOR * max(map(abs, shares)):
        expected = [count / sum(given) for count in given] if all(given) else [0] * world_size
        shift = [share / sum(shares) - part for share, part in zip(shares, expected)]
        if max(map(abs, shift)) > FACTOR:
            factors = listed(f"{share * world_size:.3g}" for share in shares)
            return "other gradients", f"the mean of the ranks' own times {factors}"
        return "mean", "weighted by the ranks' samples"
    return "shared", ""


def kind_of_tensor(locals_, finals, name, tolerance):
    """Return "shared", "own", "lost" (half of a complex one) or "other" of one tensor."""
    local = [gradients[name] for gradients in locals_]
    final = [gradients[name] for gradients in finals]
    if equal(final, tolerance):
        half = name.endswith((", real", ", imaginary"))
        return "lost" if half and not any(map(size_of, final)) and all(map(size_of, local)) \
            else "shared"
    return "own" if own_times_factors(final, local, tolerance) else "other"


def shares_of(final, local, tolerance):
    """Return the factors with which `final` is a sum of the ranks' own gradients, or []."""
    import numpy
    base = numpy.array(local).T
    shares = numpy.linalg.lstsq(base, numpy.array(final), rcond=None)[0]
    left = size_of(base @ shares - final)
    return shares.tolist() if left < tolerance * size_of(final) else []


def kind_of_factor(factor, world_size):
    """Return the same where all ranks take the mean times this factor."""
    for kind, expected in ("mean", 1), ("sum", world_size), ("twice", 1 / world_size):
        if abs(factor - expected) < FACTOR * expected:
            return kind, f"the mean times {factor:.3g}"
    return "scaled", f"the mean times {factor:.4g}"


def divided_by_all(ranks):
    """Return True if the losses were divided by the number of ranks, or by all ranks' samples."""
    micro, samples = ranks[0]["backwards"], [len(g) for step in ranks for g in step["given"]]
    expected = {len(ranks) * micro, sum(samples)}
    return any(abs(number - all_ranks) < FACTOR * all_ranks
               for number in ranks[0]["divisors"] for all_ranks in expected if all_ranks)


def not_finite(ranks):
    """Return the ranks, in words, whose own gradients or whose final ones are not finite."""
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
    kinds_of = {}  # {the tensors of a step: [(number of the step, kind, where)]}
    findings, divided = {}, False
    for number, ranks in paired(reports):
        where = not_finite(ranks)
        if where:
            findings.setdefault("not finite", f"{where}, since step {number}")
            continue
        names = sorted(set.intersection(
            *(set(step[key]) for step in ranks for key in ("local", "final"))))
        if not any(any(step["local"][name]) for step in ranks for name in names):
            continue
        finals = whole([step["final"] for step in ranks], parts & set(names))
        given = [sum(map(len, step["given"])) for step in ranks]
        kind, where = kind_of([step["local"] for step in ranks], finals, names, tolerance, given)
        if kind == "twice" and ranks[0]["backwards"] == len(ranks):
            kind = "scaled"  # the mean over as many micro-batches
        divided = divided or divided_by_all(ranks)
        kinds_of.setdefault(tuple(names), []).append((number, kind, where))

    for steps in kinds_of.values():
        always = len({kind for _, kind, _ in steps}) == 1
        for number, kind, where in steps:
            if kind in ("sum", "twice") and not always:
                kind = "scaled"  # clipping may be by any factor; a mistake is the same in each step
            if kind == "sum" and divided:
                kind = "mean"
            where = ", ".join(filter(None, [where, f"since step {number}"]))
            findings.setdefault(kind, where)
    if "mean" in findings and divided and reports[0]["wrappers"]:
        add_note(findings, "the loss was divided by the number of ranks, and its gradients are "
                 "averaged: if that was not for micro-batches, they are too small")
    if hook and "other gradients" in findings:  # PowerSGD and the like
        add_note(findings, f"DDP's hook {hook} changes the gradients: not compared")
        del findings["other gradients"]
    text = {"mean": "the mean of the ranks' own", "scaled": "their mean times a factor",
            "own gradients": "each rank's own", "sum": "the sum of the ranks' own",
            "shared": "the same on all ranks, changed after they were averaged"}
    seen = listed(text.get(kind, kind) for kind in findings if kind != "note") or "not seen"
    return [("gradients the optimizer takes", seen)], findings


def equal_own_gradients(reports):
    """Return the optimizers in each step of which all ranks' own gradients were equal.

    So were their samples. Not where some parameters' gradients are not seen.
    """
    equal_in = {}  # {optimizer: in each step?}
    for _, ranks in paired(reports):
        locals_ = [step["local"] for step in ranks]
        names = sorted(set.intersection(*map(set, locals_)))
        missing = len({name.split(", ")[0] for name in names}) < len(ranks[0]["state"])
        vectors = [vector(local, names) for local in locals_]
        same = not missing and any(vectors[0]) and equal(vectors, 1e-5)
        optimizer = ranks[0]["optimizer"]
        equal_in[optimizer] = same and equal_in.get(optimizer, True)
    return [optimizer for optimizer, same in equal_in.items() if same]


# Data.

def judge_loader(loaders):
    """Return (what is seen or "", findings) of one DataLoader, on each rank."""
    world_size, findings, first = len(loaders), {}, loaders[0]
    epochs = [loader["epochs"][0] if loader["epochs"] else [] for loader in loaders]
    dealt = all(loader["dealt"] for loader in loaders)
    alike = first["like"] and len({loader["like"] for loader in loaders}) == 1
    if all(epochs) and alike:
        common = set.intersection(*map(set, epochs))
        counts = Counter(number for epoch in epochs for number in set(epoch))
        several = [number for number, times in counts.items() if times > 1]
        drawn = [len(set(epoch)) for epoch in epochs]
        padding = max(2 * world_size, sum(drawn) - first["items"])  # so that all have as many
        seen = f"{listed(sorted(set(drawn)))} samples drawn on each rank, {len(several)} on several"
        same = judge_samples([loader["batches"] for loader in loaders], "drawn")[1]
        if min(drawn) == len(common) > 1 and (dealt or same):
            findings["same data"] = f"samples {listed(sorted(common)[:4])}, ... on each rank"
        elif len(several) > padding and dealt:
            findings["overlap"] = f"{len(several)} of {sum(drawn)} drawn samples"
        elif len(several) > padding:
            add_note(findings, f"{len(several)} samples were drawn on several ranks: right if "
                     "the sampler means it, such as one with replacement")
    else:  # a stream; or data of each rank's own, whose numbers mean nothing
        batches = [loader["batches"] for loader in loaders]
        seen, findings = judge_samples(batches, "drawn")
        several = common_samples(batches) if dealt and not findings else 0
        if several > max(2 * world_size, first["items"] // 1000):
            findings["overlap"] = f"{several} of the samples that each rank has drawn"
    for loader in loaders:
        if loader.get("ranks", world_size) != world_size and (
                findings or loader["ranks"] > world_size):
            findings["sampler"] = f"for {plural(loader['ranks'], 'rank')}, and {world_size} train"
    shuffled = [epoch for epoch in first["epochs"] if len(epoch) > 2 and first.get("shuffle")]
    if any(one[:len(other)] == other[:len(one)]
           for index, one in enumerate(shuffled) for other in shuffled[:index]):
        findings["order"] = "a DistributedSampler's"
    return seen, findings


def common_samples(batches):
    """Return how many samples all ranks have, if none has one twice: else the data repeat."""
    ranks = [[sample for batch in rank for sample in batch] for rank in batches]
    if any(len(set(rank)) < len(rank) for rank in ranks):
        return 0
    return len(set.intersection(*map(set, ranks)))


def judge_samples(batches, verb):
    """Return (what is seen or "", findings) of the checksums of the ranks' samples."""
    counts = [Counter(sample for batch in rank for sample in batch) for rank in batches]
    if not all(counts):
        return "", {}
    common = counts[0]
    for count in counts[1:]:
        common = common & count
    totals = [sum(count.values()) for count in counts]
    shared = sum(common.values())
    # Samples that repeat on one rank are few kinds of samples: ranks have them by chance, too.
    distinct = min(len(count) / total for count, total in zip(counts, totals)) > 0.9
    same = shared > min(totals) / 2 if distinct else len(set(map(str, batches))) == 1
    where = f"{shared} of the {min(totals)} samples {verb}"
    seen = (f"{listed(sorted(set(totals)))} samples {verb} on each rank, {shared} on all")
    return seen, {"same data": where} if same else {}


def judge_data(reports):
    """Return the lines and findings of what the loaders drew, else of what models were given."""
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
        notes += [more.pop("note")] if "note" in more else []
        lines, findings = lines + more_lines, findings | more
    findings = {key: where for key, where in findings.items() if key in SYMPTOMS}
    if "own gradients" in findings and not findings.keys() & {"weights", "apart"}:
        notes.append("each optimizer takes its rank's own gradients, and the weights are equal "
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
    causes = {key: where for key, where in findings.items()
              if not FOLLOWS.get(key, set()) & findings.keys()}
    return lines, causes | ({"note": "; ".join(notes)} if notes else {})


def parallel_models(reports):
    """Return the findings that are no mistakes where the ranks have parts of one model."""
    first, data = reports[0], {"same data", "overlap"}
    if any(name.startswith("all_to_all") for name in first["calls"]):
        return data | {"weights", "apart", "part"}  # experts, or tables of embeddings
    tensor_parallel = first["shards"] and not first["wrappers"]
    return data if tensor_parallel else set()


def judge_hang(states: list[tuple[dict, dict]], seconds: float) -> tuple[Lines, Findings]:
    """Return the same of ranks that wait for ever.

    states: of each rank its report, if it has ended, and its last sign of life.
    """
    lines, calls = [], []
    for rank, (report, alive) in enumerate(states):
        stack = alive["stack"] if alive else ["the start"]
        place = "the end" if report else " < ".join(stack)
        calls.append("" if report or not alive else alive["call"])
        lines.append((f"rank {rank}", f"at {place}"))
    if len(set(calls)) > 1 and not set(calls) <= {"", "barrier"}:
        where = [f"rank {rank} in {call}, {states[rank][1]['stack'][0]}"
                 for rank, call in enumerate(calls) if call]
        return lines, {"sequence": f"{listed(where)}; the others are not there"}
    return lines, {"hang": f"for {seconds:.0f} s, at the lines above"}


def judge_calls(calls: list[list[str]]) -> tuple[Lines, Findings]:
    """Return the same of ranks whose next collectives are different: (call, place) of each."""
    lines = [(f"rank {rank}", f"{call}, at {place}") for rank, (call, place) in enumerate(calls)]
    return lines, {"sequence": listed(sorted({call for call, _ in calls}))}


def without_steps(reports: list[dict]) -> str:
    """Return what was seen of a training without an optimizer's step."""
    moved = any(report["first"].get(name) != state
                for report in reports for name, state in report["last"].items()
                if name in report["first"])
    if not any(report["backwards"] for report in reports):
        return "no backward of a loss was seen"
    if not moved:
        return "no weight moved"
    names = differing([report["last"] for report in reports], reports[0]["shards"])
    total = len(reports[0]["last"])
    state = f"apart: {words_of(names, total)}" if names else "equal on all ranks"
    return f"the weights moved without one, and are {state}"


# Words.

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
    for key, where in findings.items():
        cure = next(text for applies, text in CURES[key] if applies(reports))
        say(f"WRONG: {key}: {SYMPTOMS[key]} ({where}). To do: {cure}")
    verdict = f"wrong: {listed(sorted(findings))}" if findings else "nothing wrong was found"
    say(f"verdict: {verdict}", flush=True)
