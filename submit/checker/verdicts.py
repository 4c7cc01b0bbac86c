"""What agree.py concludes from what it saw of each rank: the lines of its table, and findings."""

from collections import Counter
from statistics import median

SAME = 1e-3  # of gradients: rounding of fp32, other orders of summation; mistakes exceed a tenth
SAME_HALF = 3e-2  # where gradients have 8 or 11 bits
FACTOR = 0.02  # how near a factor has to be to 1, to the number of ranks, or to one over that

FINDINGS = {  # {name: (what was seen, what to do)}
    "weights": (
        "the ranks begin with different weights",
        "wrap the model when it is complete, or broadcast rank 0's parameters before step 1"),
    "apart": (
        "the ranks' weights drift apart",
        "use one optimizer and one learning rate on all ranks, and load its state on all of them"),
    "nothing trains": (
        "no weight has changed",
        "give the optimizer the parameters of the model that is called, and a learning rate"),
    "own gradients": (
        "each rank takes its own gradients: there are as many trainings as ranks",
        "call the wrapped model; with Horovod, step hvd.DistributedOptimizer"),
    "part": (
        "some parameters' gradients are averaged, others are each rank's own",
        "wrap every model that is trained, when it is complete"),
    "one rank's": (
        "all ranks take the gradients of one of them, and the others' samples are lost",
        "all-reduce the gradients, and divide by the number of ranks"),
    "sum": (
        "the gradients are summed, not averaged: as many times too large as there are ranks",
        "divide by the number of ranks, or use op=AVG"),
    "twice": (
        "the gradients are averaged twice: as many times too small as there are ranks",
        "divide once: DDP and Horovod do"),
    "other gradients": (
        "the optimizer takes neither the mean of the ranks' gradients nor any rank's own",
        "average first; then clip and unscale on all ranks alike"),
    "same data": (
        "all ranks train on the same samples",
        "deal them out: DistributedSampler instead of shuffle=True, or order[rank::world_size]"),
    "overlap": (
        "ranks train on other ranks' samples, too",
        "DistributedSampler instead of shuffle=True, and one seed on all ranks for a split"),
    "sampler": (
        "the sampler deals for another number of ranks than train",
        "DistributedSampler(data) after init_process_group; with Horovod num_replicas=hvd.size()"),
    "order": (
        "two epochs have the same order",
        "sampler.set_epoch(epoch) at the start of each epoch"),
    "steps": (
        "some ranks have made fewer optimizer steps than others",
        "give all ranks equally many batches"),
    "one GPU": (
        "several ranks are on one GPU",
        "torch.cuda.set_device(local_rank) before the model is moved"),
    "hang": (
        "the ranks wait for each other for ever",
        "all ranks have to make the same calls in one order: look at these lines"),
}
FOLLOWS = {  # {a finding: others that bring it about; then it is not repeated}
    "apart": {"own gradients", "part", "other gradients"},
    "same data": {"sampler"},
    "overlap": {"sampler"},
}

Findings = dict[str, str]  # {key of FINDINGS: where it is}
Lines = list[tuple[str, str]]  # (what was looked at, what was seen)


def listed(values):
    return ", ".join(map(str, values))


def plural(count, word):
    return f"{count} {word}{'s' * (count != 1)}"


# Weights.

def differing(states):
    """Return where the ranks' fingerprints differ, in words, or "".

    The ranks that are named differ from most; all of them, where each differs from each other.
    """
    names = {}
    for name in states[0]:
        values = [state.get(name) for state in states]
        if len(set(values)) > 1:
            usual, times = Counter(values).most_common(1)[0]
            others = [rank for rank, value in enumerate(values) if value != usual]
            names[name] = others if times > 1 else list(range(len(values)))
    if not names:
        return ""
    name, ranks = next(iter(names.items()))
    tensors = plural(len(states[0]), "tensor")
    return f"{len(names)} of {tensors}, such as {name}, on rank {listed(ranks)}"


def judge_weights(reports):
    """Return the lines and findings of the parameters."""
    findings = {}
    before = [report["before"] for report in reports]
    after = list(zip(*([step["after"] for step in report["steps"]] for report in reports)))
    at_start, at_end = differing(before), differing(after[-1])
    steps_apart = [step for step, states in enumerate(after, 1) if differing(states)]
    if at_start:
        findings["weights"] = at_start
    elif steps_apart:
        findings["apart"] = f"since step {steps_apart[0]}"
    if before[0] and before == list(after[-1]):
        findings["nothing trains"] = f"in {plural(len(after), 'step')}"

    equal = "equal" if before[0] else "not compared"
    shards = len(reports[0]["shards"])
    if shards:
        equal += f"; {plural(shards, 'tensor')} of which each rank has another shard"
    return [("weights before step 1", at_start or equal),
            (f"weights after {plural(len(after), 'step')}", at_end or equal)], findings


# Gradients: projections are linear, so those of a mean are the mean of those of its parts.

def vector(step, key, names):
    return [number for name in names for number in step[key][name]]


def mean_of(vectors):
    return [sum(column) / len(vectors) for column in zip(*vectors)]


def fit(values, base):
    """Return the factor s and what is left of `values` after s times `base`, relative to it."""
    square = sum(b * b for b in base)
    factor = sum(a * b for a, b in zip(values, base)) / square if square else 0.0
    size = sum(a * a for a in values) ** 0.5
    left = sum((a - factor * b) ** 2 for a, b in zip(values, base)) ** 0.5
    return factor, left / size if size else 0.0


def alike(values, base, tolerance):
    return fit(values, base)[1] < tolerance


def joined(steps, names):
    """Return the ranks' steps with whole gradients in place of shards: the sum of the parts."""
    whole = {name: [sum(column) for column in zip(*(step["final"][name] for step in steps))]
             for name in names}
    return [step | {"final": step["final"] | whole} for step in steps]


def kind_of(steps, names, tolerance):
    """Return (a finding or "mean", where) of the ranks' gradients of these tensors in a step."""
    local = [vector(step, "local", names) for step in steps]
    final = [vector(step, "final", names) for step in steps]
    world_size, mean = len(local), mean_of(local)
    fits = [fit(values, mean) for values in final]
    if all(left < tolerance for _, left in fits):
        return kind_of_factor([factor for factor, _ in fits], world_size)
    for rank in range(world_size):
        if all(alike(values, local[rank], tolerance) for values in final):
            return "one rank's", f"those of rank {rank}"
    if all(alike(values, own, tolerance) for values, own in zip(final, local)):
        return "own gradients", ""
    return "other gradients", ""


def kind_of_factor(factors, world_size):
    """Return the same where the ranks take the mean times these factors."""
    factor = median(factors)
    if max(factors) - min(factors) > FACTOR * abs(factor):
        return "other gradients", f"the mean times {listed(f'{value:.4g}' for value in factors)}"
    for kind, expected in ("mean", 1), ("sum", world_size), ("twice", 1 / world_size):
        if abs(factor - expected) < FACTOR * expected:
            return kind, f"the mean times {factor:.3g}"
    return "scaled", f"the mean times {factor:.4g}"


def judge_gradients(reports):
    """Return the lines and findings of the gradients in each step."""
    hook = reports[0]["hook"]
    tolerance = SAME_HALF if hook or any(report["half"] for report in reports) else SAME
    steps_of = {}  # {the tensors of a step: [(number of the step, finding, where)]}
    for number, steps in enumerate(zip(*(report["steps"] for report in reports)), 1):
        names = sorted(set.intersection(
            *(set(step[key]) for step in steps for key in ("local", "final"))))
        if not names:
            continue
        steps = joined(steps, set(reports[0]["parts"]) & set(names))
        kind, where = kind_of(steps, names, tolerance)
        tensors = names
        if kind == "other gradients":
            own = [name for name in names
                   if kind_of(steps, [name], tolerance)[0] == "own gradients"]
            if own and len(own) < len(names):
                kind, tensors = "part", own
        where = where or f"such as {tensors[0]}"
        steps_of.setdefault(tuple(names), []).append((number, kind, where))

    findings = {}
    for steps in steps_of.values():
        always = len({kind for _, kind, _ in steps}) == 1
        for number, kind, where in steps:
            if not always and kind in ("sum", "twice"):
                kind = "scaled"  # clipping may be by any factor; a mistake is the same in each step
            findings.setdefault(kind, f"{where}, since step {number}")
    if hook and "other gradients" in findings:  # PowerSGD and the like
        findings[f"not compared: DDP's hook {hook} changes them"] = findings.pop("other gradients")
    text = {"mean": "the mean of the ranks' own", "scaled": "their mean times a factor",
            "own gradients": "each rank's own", "sum": "the sum of the ranks' own"}
    seen = listed(text.get(kind, kind) for kind in findings) or "not seen"
    findings = {kind: where for kind, where in findings.items() if kind in FINDINGS}
    return [("gradients the optimizer takes", seen)], findings


# Data.

def judge_loader(loaders):
    """Return (what is seen or "", findings) of one DataLoader, on each rank."""
    world_size, findings, first = len(loaders), {}, loaders[0]
    same_data = len({loader["like"] for loader in loaders}) == 1
    if all("ranks" in loader for loader in loaders):
        orders = list(first["orders"].values())
        if any(loader["ranks"] != world_size for loader in loaders):
            findings["sampler"] = f"for {plural(first['ranks'], 'rank')}, and {world_size} train"
        if first["shuffle"] and len(orders) > len(set(orders)):
            findings["order"] = "a DistributedSampler's"
    epochs = [next(iter(loader["epochs"].values()), []) for loader in loaders]
    if not all(epochs) or not same_data or not first["like"]:
        return "", findings  # a stream; or data of each rank's own, whose numbers mean nothing

    common = set.intersection(*map(set, epochs))
    counts = Counter(number for epoch in epochs for number in set(epoch))
    several = [number for number, times in counts.items() if times > 1]
    drawn = [len(set(epoch)) for epoch in epochs]
    padding = max(2 * world_size, sum(drawn) - first["items"])  # so that all have as many
    if min(drawn) == len(common):
        findings["same data"] = f"samples {listed(sorted(common)[:4])}, ... on each rank"
    elif all(loader["whole"] for loader in loaders):
        findings["overlap"] = f"each rank goes through all {first['items']:,} samples"
    elif len(several) > padding and not first["replacement"]:
        findings["overlap"] = f"{len(several)} of {sum(drawn)} drawn samples"
    numbers = listed(sorted(set(drawn)))
    return f"{numbers} samples drawn on each rank, {len(several)} on several", findings


def judge_data(reports):
    """Return the lines and findings by the samples' numbers, else by what the models are given."""
    findings, seen = {}, ""
    used = {name for report in reports for name, loader in report["loaders"].items()
            if loader["used"]}
    for name in sorted(used):
        loaders = [report["loaders"].get(name) for report in reports]
        if all(loaders):
            text, more = judge_loader(loaders)
            seen, findings = seen or text, findings | more

    given = [{sample for batch in report["rows"] for sample in batch} for report in reports]
    if not seen and all(given):
        common, fewest = set.intersection(*given), min(map(len, given))
        if len(common) > fewest / 2:
            findings["same data"] = f"{len(common)} of the {fewest} samples given to the models"
        counts = listed(sorted(set(map(len, given))))
        seen = f"{counts} samples given on each rank, {len(common)} on all"
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
    lines, findings = [], {}
    steps = [len(report["steps"]) for report in reports]
    if len(set(steps)) > 1:
        findings["steps"] = f"{listed(steps)} on ranks 0 to {len(steps) - 1}"
    for judge_part in judge_weights, judge_gradients, judge_data, judge_devices:
        more_lines, more = judge_part(reports)
        lines, findings = lines + more_lines, findings | more
    causes = {key: where for key, where in findings.items()
              if not FOLLOWS.get(key, set()) & findings.keys()}
    return lines, causes


def judge_hang(states: list[tuple[dict, dict]], seconds: float) -> tuple[Lines, Findings]:
    """Return the same of ranks that wait for ever.

    states: of each rank its report, if it has ended, and its last sign of life.
    """
    lines = []
    for rank, (report, alive) in enumerate(states):
        stack = alive["stack"] if alive else ["the start"]
        place = "the end" if report else " < ".join(stack)
        lines.append((f"rank {rank}", f"at {place}"))
    return lines, {"hang": f"for {seconds:.0f} s, at the lines above"}


# Words.

def show(script: str, reports: list[dict], lines: Lines, findings: Findings) -> None:
    """Print the table, a line per finding, and the verdict."""
    if all(reports):
        nodes = plural(len({report["host"] for report in reports}), "node")
        steps = plural(min(len(report["steps"]) for report in reports), "step")
        wrappers = listed(reports[0]["wrappers"]) or "no known wrapper"
        tensors = len(reports[0]["before"]) + len(reports[0]["shards"])
        print(f"{script}: {plural(len(reports), 'rank')} on {nodes}, {steps}; {wrappers}; "
              f"{plural(tensors, 'tensor')}")
    for what, seen in lines:
        print(f"  {what:30} {seen}")
    for key, where in findings.items():
        symptom, advice = FINDINGS[key]
        print(f"WRONG: {key}: {symptom} ({where}). To do: {advice}")
    verdict = f"wrong: {listed(sorted(findings))}" if findings else "nothing wrong was found"
    print(f"verdict: {verdict}", flush=True)
