"""What agree.py concludes from what it saw of each rank: the lines of its table, and findings."""

from collections import Counter
from statistics import median
from typing import NamedTuple

SAME = 1e-3  # of gradients: rounding of fp32, other orders of summation; mistakes exceed a tenth
SAME_HALF = 3e-2  # where gradients have 8 or 11 bits
FACTOR = 0.02  # how near a factor has to be to 1, to the number of ranks, or to one over that


class Finding(NamedTuple):
    """What --explain says of it. A note is worth knowing, and no mistake by itself."""
    symptom: str
    cause: str
    cure: str
    note: bool = False


FINDINGS = {
    "alone": Finding(
        "each process trains alone, as if it were the only one",
        "nothing in the script asks the launcher which rank it is",
        "init_process_group and DDP, hvd.init, or deepspeed.initialize"),
    "weights": Finding(
        "the ranks begin with different weights",
        "nobody broadcasts one rank's weights, or they are drawn after the wrapper was made",
        "wrap the model when it is ready, or broadcast rank 0's parameters before the first step"),
    "apart": Finding(
        "the ranks' weights drift apart",
        "the optimizers' states differ, or something besides the optimizer changes the weights",
        "the same optimizer on all ranks; load its state on all of them, or on none"),
    "own gradients": Finding(
        "each rank takes its own gradients: there are as many trainings as ranks",
        "the wrapper of the model (with Horovod: of the optimizer) is missing, or is bypassed by "
        "`model(x)` or `ddp.module(x)` instead of `ddp(x)`, or `no_sync` stays on",
        "call the wrapped model, and let the last backward before each step average; with "
        "Horovod, take the step of `hvd.DistributedOptimizer`"),
    "one rank's": Finding(
        "all ranks take the gradients of one of them, and the others' samples are lost",
        "gradients are broadcast, not averaged",
        "all-reduce them and divide by the number of ranks, or let DDP"),
    "sum": Finding(
        "the gradients are summed, not averaged: as many times too large as there are ranks",
        "an all-reduce without a division, or op=Sum; Adam hides it, SGD does not",
        "divide by the number of ranks, or op=AVG; where a sum is meant, divide the learning rate"),
    "twice": Finding(
        "the gradients are averaged twice: as many times too small as there are ranks",
        "a division in addition to DDP's or Horovod's (or one for as many accumulated batches)",
        "divide once"),
    "rates": Finding(
        "the optimizers' learning rates differ between the ranks",
        "a rate that is computed from the rank, or a schedule that follows a rank's own loss",
        "compute it from what all ranks have; all-reduce the loss before the schedule sees it"),
    "part": Finding(
        "some parameters' gradients are averaged, others are each rank's own",
        "the wrapper does not know these parameters: they were made after it, belong to another "
        "module, or are ignored",
        "make the whole model before it is wrapped; wrap every model that is trained"),
    "other gradients": Finding(
        "the optimizer takes neither the mean of the ranks' gradients nor any rank's own",
        "something changes them on a rank: clipping before they are averaged, or afterwards with "
        "a limit of its own; noise; a scale",
        "average first; then clip and unscale on all ranks alike"),
    "same data": Finding(
        "all ranks train on the same samples",
        "no sampler deals them out, and all ranks shuffle with one seed",
        "sampler=DistributedSampler(dataset) instead of shuffle=True"),
    "overlap": Finding(
        "ranks train on other ranks' samples, too: an epoch repeats some, and may lack others",
        "shuffle=True without a sampler; or each rank splits or orders the data with a seed of "
        "its own, and a DistributedSampler deals them out",
        "sampler=DistributedSampler(dataset) instead of shuffle=True; one seed for the split"),
    "sampler": Finding(
        "the sampler deals for another number of ranks than train",
        "its num_replicas and rank are typed in, or asked before the ranks met",
        "DistributedSampler(dataset) after init_process_group; with Horovod "
        "num_replicas=hvd.size(), rank=hvd.rank()"),
    "order": Finding(
        "each epoch has the same order",
        "sampler.set_epoch is not called: DistributedSampler shuffles by its seed and the epoch",
        "sampler.set_epoch(epoch) at the start of each epoch"),
    "batches": Finding(
        "the ranks have unequal numbers of batches: those with more hang at the epoch's end",
        "the data set is divided unequally, and Join is not used",
        "DistributedSampler, which gives all ranks equally many, or "
        "torch.distributed.algorithms.Join"),
    "steps": Finding(
        "some ranks have made fewer optimizer steps than others",
        "unequal data, or a condition that only some ranks fulfil",
        "let all ranks decide by a value that all have, such as an all-reduced one"),
    "one GPU": Finding(
        "two ranks are on one GPU",
        "`cuda` without set_device is GPU 0 for every rank",
        "torch.cuda.set_device(local_rank) before the model is moved"),
    "other GPU": Finding(
        "a rank's model is on another GPU than its current one",
        "no set_device, or one after the model was moved: ranks may also take memory on GPU 0",
        "torch.cuda.set_device(local_rank) first, then .to('cuda')", note=True),
    "hang": Finding(
        "the ranks wait for each other for ever",
        "one of them calls other collectives than the others, or none: a condition, an exception "
        "that the script catches, or a loop that ends earlier on some ranks",
        "look at the lines that are named: all ranks have to make the same calls in one order"),
    "sequence": Finding(
        "the ranks call different collectives",
        "a condition on the rank, around a call that all have to make",
        "take the call out of the condition; print or save under `rank == 0`"),
    "no set_epoch": Finding(
        "set_epoch was not called, so every epoch would have the order of this one",
        "DistributedSampler shuffles by its seed and the epoch that set_epoch names",
        "sampler.set_epoch(epoch) at the start of each epoch; one epoch needs none", note=True),
    "numbers": Finding(
        "the ranks draw the same samples by their numbers, and their contents were not compared",
        "a data set that generates its samples, with another seed on each rank; or one that all "
        "ranks share, and no sampler deals it out",
        "in the second case sampler=DistributedSampler(dataset) instead of shuffle=True",
        note=True),
    "other data": Finding(
        "each rank has another data set, and a DistributedSampler deals it a part of its own",
        "data that are drawn without a seed, or listed in another order on each rank",
        "one seed before the data are made, sorted names; or shuffle=True, if each rank has its "
        "own share", note=True),
    "scaled": Finding(
        "the gradients are the ranks' mean times a factor",
        "clipping (which hides whether the mean or the sum is clipped), a loss scale that is "
        "taken out again, or a division by the accumulated batches",
        "nothing, if one of these is meant; else look for a second division", note=True),
    "buffers": Finding(
        "buffers differ between the ranks",
        "BatchNorm's statistics are of each rank's own samples",
        "nothing: save rank 0's; torch.nn.SyncBatchNorm makes them equal", note=True),
    "random": Finding(
        "all ranks draw the same random numbers: dropout or augmentation does the same on each",
        "torch.manual_seed with the same number on every rank",
        "torch.manual_seed(seed + rank) once the weights are equal", note=True),
    "batch": Finding(
        "the ranks' batches are of unequal size in a step",
        "the last batch of an epoch, or a division with a remainder",
        "drop_last=True, or weigh each rank's loss: a mean of means is not the mean", note=True),
    "threads": Finding(
        "the ranks of a node have more threads than it has cores",
        "each rank takes all cores",
        "OMP_NUM_THREADS=1, or the cores divided by the ranks", note=True),
    "cores": Finding(
        "a node has more ranks than cores for them: they take turns",
        "more ranks were asked for, or the launcher binds several to one core",
        "fewer ranks per node; a trial may be slow", note=True),
    "unseen": Finding(
        "the gradients could not be compared",
        "nothing meets them here: the first FSDP, Adasum, a compressing hook of DDP, a bypassed "
        "wrapper",
        "the line on weights says what was compared instead; of FSDP, fully_shard is seen",
        note=True),
}
NOTES = {key for key, finding in FINDINGS.items() if finding.note}
FOLLOWS = {  # {a finding: others that bring it about; then it is not repeated}
    "apart": {"own gradients", "part", "other gradients", "rates"},
    "weights": {"alone"},
    "own gradients": {"alone"},
    "sampler": {"alone"},
    "same data": {"alone", "sampler"},
    "overlap": {"alone", "sampler"},
    "order": {"alone"},
    "no set_epoch": {"alone", "order"},
    "batches": {"sampler"},
    "hang": {"sequence"},
    "batch": {"batches"},
    "numbers": {"same data", "alone"},
}

Findings = dict[str, str]  # {key of FINDINGS: where it is}
Lines = list[tuple[str, str]]  # (what was looked at, what was seen)


def listed(values):
    return ", ".join(map(str, values))


def plural(count, word):
    return f"{count} {word}{'s' * (count != 1)}"


def ranks_text(some_ranks, world_size):
    if len(some_ranks) == world_size:
        return "all ranks"
    return f"rank{'s' * (len(some_ranks) > 1)} {listed(some_ranks)}"


# Weights.

def differing(states):
    """Return {name: the ranks that differ from most} of the ranks' fingerprints.

    All ranks, where each differs from each other.
    """
    names = {}
    for name in states[0]:
        values = [state.get(name) for state in states]
        if len(set(values)) > 1:
            usual, times = Counter(values).most_common(1)[0]
            others = [rank for rank, value in enumerate(values) if value != usual]
            names[name] = others if times > 1 else list(range(len(values)))
    return names


def first_of(apart, all_names, world_size):
    name, some_ranks = next(iter(apart.items()))
    tensors = plural(len(all_names), "tensor")
    return f"{len(apart)} of {tensors}, such as {name}, on {ranks_text(some_ranks, world_size)}"


def judge_weights(reports):
    """Return the lines and findings of parameters, buffers and learning rates."""
    world_size, findings = len(reports), {}
    before = [report["before"]["parameters"] for report in reports]
    apart = differing(before)
    if apart:
        findings["weights"] = first_of(apart, before[0], world_size)

    steps = min(len(report["steps"]) for report in reports)
    for number in range(steps):
        rates = [report["steps"][number]["rates"] for report in reports]
        if any(rate != rates[0] for rate in rates):
            numbers = listed(f"{rate[0]:.4g}" for rate in rates)
            findings["rates"] = f"step {number + 1}: {numbers}"
            break
    for number in range(steps):
        after = [report["steps"][number]["after"]["parameters"] for report in reports]
        moved = differing(after)
        if moved and not apart:
            first = first_of(moved, after[0], world_size)
            findings["apart"] = f"since step {number + 1}: {first}"
            break

    buffers = differing([report["steps"][-1]["after"]["buffers"] for report in reports])
    if buffers:
        findings["buffers"] = f"{len(buffers)}, such as {next(iter(buffers))}"

    equal = "equal" if before[0] else "not compared"
    shards = len(reports[0]["shards"])
    if shards:
        equal += f"; {plural(shards, 'tensor')} of which each rank has another shard"
    at_end = "different" if apart else findings.get("apart", equal)
    return [("weights before step 1", findings.get("weights", equal)),
            (f"weights after {plural(steps, 'step')}", at_end)], findings


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

    kinds, findings = Counter(), {}
    for steps in steps_of.values():
        always = len({kind for _, kind, _ in steps}) == 1
        for number, kind, where in steps:
            if not always and kind in ("sum", "twice"):
                kind = "scaled"  # clipping may be by any factor; a mistake is the same in each step
            kinds[kind] += 1
            findings.setdefault(kind, f"{where}, since step {number}")
    findings.pop("mean", None)
    if hook and "other gradients" in findings:  # PowerSGD and the like
        findings["unseen"] = f"DDP's hook {hook} changes them: {findings.pop('other gradients')}"
    if not kinds:
        findings["unseen"] = ""
    text = {"mean": "the mean of the ranks' own", "scaled": "their mean times a factor",
            "own gradients": "each rank's own", "sum": "the sum of the ranks' own"}
    seen = listed(text.get(kind, kind) for kind in kinds) or "not seen"
    return [("gradients the optimizer takes", seen)], findings


# Data.

def judge_loader(loaders, joins=False):
    """Return (what is seen or "", findings) of one DataLoader, on each rank."""
    world_size, findings = len(loaders), {}
    batches = [loader["batches"] for loader in loaders]
    if len(set(batches)) > 1 and not joins:
        findings["batches"] = f"{listed(batches)} in an epoch on ranks 0 to {world_size - 1}"
    same_data = len({loader["like"] for loader in loaders}) == 1
    if all("ranks" in loader for loader in loaders):
        findings |= judge_sampler(loaders, same_data)
    epochs = [loader["epochs"][0] for loader in loaders]
    if not all(epochs) or not same_data:
        return "", findings  # a stream; or data of each rank's own, whose numbers mean nothing

    common = set.intersection(*map(set, epochs))
    counts = Counter(number for epoch in epochs for number in set(epoch))
    several = [number for number, times in counts.items() if times > 1]
    drawn = [len(set(epoch)) for epoch in epochs]
    padding = max(2 * world_size, sum(drawn) - loaders[0]["items"])  # so that all have as many
    # If samples may be generated, the same number may be another sample on each rank.
    sure = all(loader["holds"] for loader in loaders)
    replaced = any(loader["replacement"] for loader in loaders)
    if min(drawn) == len(common):
        findings["same data" if sure else "numbers"] = (
            f"samples {listed(sorted(common)[:4])}, ... on each rank")
    elif all(loader["whole"] for loader in loaders):
        findings["overlap" if sure else "numbers"] = (
            f"each rank goes through all {loaders[0]['items']:,} samples")
    elif "overlap" not in findings and len(several) > padding and not replaced:
        findings["overlap" if sure else "numbers"] = (
            f"{len(several)} of {sum(drawn)} drawn samples")
    numbers = listed(sorted(set(drawn)))
    return f"{numbers} samples drawn on each rank, {len(several)} on several", findings


def judge_sampler(loaders, same_data):
    """Return the findings of a DistributedSampler on each rank."""
    world_size, findings, first = len(loaders), {}, loaders[0]
    if any(loader["ranks"] != world_size for loader in loaders):
        findings["sampler"] = f"for {plural(first['ranks'], 'rank')}, and {world_size} train"
    if first["shuffle"] and len(first["orders"]) > len(set(first["orders"])):
        findings["order"] = "seen in two epochs"
    elif first["shuffle"] and not first["set_epoch"]:
        findings["no set_epoch"] = ""
    if not same_data:
        findings["other data"] = ""
    elif len({loader["part"] for loader in loaders}) > 1:
        findings["overlap"] = "the sampler deals out another split of the data on each rank"
    return findings


def judge_data(reports):
    """Return the lines and findings by the samples' numbers, else by what the models are given."""
    findings, seen = {}, ""
    joins = any(report["joins"] for report in reports)
    used = {name for report in reports for name, loader in report["loaders"].items()
            if loader["used"]}
    for name in sorted(used):
        loaders = [report["loaders"].get(name) for report in reports]
        if all(loaders):
            text, more = judge_loader(loaders, joins)
            seen, findings = seen or text, findings | more

    batches = [report["rows"] or report["loaded"] for report in reports]
    given = [{sample for batch in of_rank for sample in batch} for of_rank in batches]
    unclear = not seen or "numbers" in findings
    if unclear and not findings.keys() & {"same data", "overlap"} and all(given):
        common, fewest = set.intersection(*given), min(map(len, given))
        if len(common) > fewest / 2:
            findings["same data"] = f"{len(common)} of the {fewest} samples given to the models"
        counts = listed(sorted(set(map(len, given))))
        seen = f"{counts} samples given on each rank, {len(common)} on all"

    for sizes in zip(*([len(batch) for batch in of_rank] for of_rank in batches)):
        if len(set(sizes)) > 1:
            findings["batch"] = f"{listed(sizes)} samples on ranks 0 to {len(reports) - 1}"
            break
    if findings.keys() & {"same data", "overlap"}:
        seen = "see below"
    return [("data", seen or "no DataLoader, no batch: not seen")], findings


# Machine.

def judge_devices(reports):
    """Return the lines and findings of GPUs, cores, threads and random numbers."""
    findings = {}
    places = [(report["host"], report["gpu"]) for report in reports]
    for place, times in Counter(places).items():
        if times > 1 and place[1]:
            sharing = [rank for rank, other in enumerate(places) if other == place]
            findings["one GPU"] = ranks_text(sharing, len(reports))
    for rank, report in enumerate(reports):
        if report["current"] and report["current"] != report["device"]:
            findings["other GPU"] = (f"rank {rank}: the model is on {report['device']}, "
                                     f"{report['current']} is current")

    for host in {report["host"] for report in reports}:
        on_host = [report for report in reports if report["host"] == host]
        threads = sum(report["threads"] for report in on_host)
        cores = len({core for report in on_host for core in report["cores"]})
        if threads > cores and reports[0]["device"] == "cpu":
            key = "cores" if all(report["threads"] == 1 for report in on_host) else "threads"
            findings[key] = f"{host}: {threads} threads, {plural(cores, 'core')}"

    randoms = [report["random"] for report in reports]
    if len({state["torch"] for state in randoms}) == 1 and randoms[0]["draws"]:
        findings["random"] = randoms[0]["draws"]
    devices = listed(sorted({report["device"] for report in reports}))
    threads = plural(reports[0]["threads"], "thread")
    return [("devices", f"{devices}; {threads} per rank")], findings


# All.

def judge(reports: list[dict]) -> tuple[Lines, Findings]:
    """Return the lines and findings of the reports of all ranks, in their order."""
    lines, findings = [], {}
    steps = [len(report["steps"]) for report in reports]
    if len(set(steps)) > 1 and not any(report["joins"] for report in reports):
        findings["steps"] = f"{listed(steps)} on ranks 0 to {len(steps) - 1}"
    for judge_part in judge_weights, judge_gradients, judge_data, judge_devices:
        more_lines, more = judge_part(reports)
        lines, findings = lines + more_lines, findings | more
    if not any(report["met"] for report in reports):
        findings["alone"] = ""
    causes = {key: where for key, where in findings.items()
              if not FOLLOWS.get(key, set()) & findings.keys()}
    return lines, causes


def judge_hang(states: list[tuple[dict, dict]], seconds: float) -> tuple[Lines, Findings]:
    """Return the same of ranks that wait for ever.

    states: of each rank its report, if it has ended, and its last sign of life.
    """
    places, lines = {}, []
    for rank, (report, alive) in enumerate(states):
        place, stack = "at the start", "at the start"
        if report:
            place = stack = "ended"
        elif alive:
            place, stack = f"at {alive['stack'][0]}", " < ".join(alive["stack"])
        places.setdefault(place, []).append(rank)
        lines.append((f"rank {rank}", stack))
    difference = first_difference([alive for _, alive in states if alive])
    if difference:
        return lines, {"sequence": difference}
    rarest = sorted(places.items(), key=lambda item: len(item[1]))  # where few are is the mistake
    text = "; ".join(f"{place}: rank{'s' * (len(some_ranks) > 1)} {listed(some_ranks)}"
                     for place, some_ranks in rarest)
    return lines, {"hang": f"{text}, for {seconds:.0f} s"}


def first_difference(alive):
    """Return where the ranks' sequences of collectives part, in words, or None."""
    first = max(rank["first"] for rank in alive)
    last = min(rank["first"] + len(rank["calls"]) for rank in alive)
    for number in range(first, last):
        calls = [rank["calls"][number - rank["first"]] for rank in alive]
        if len({call.split(" at ")[0] for call in calls}) > 1:
            return "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
    return None


def why_not(reports: list[dict]) -> str:
    """Return why nothing can be judged."""
    if any(report["bare"] for report in reports):
        return "trains no torch.nn.Module that was seen in training mode: nothing to compare"
    return "ended before a step of a PyTorch optimizer: nothing to compare"


# Words.

def explain(key: str) -> str:
    finding = FINDINGS[key]
    return f"{key}: {finding.symptom}\n  cause: {finding.cause}\n  cure: {finding.cure}"


def verdict(findings: Findings) -> str:
    wrong = sorted(findings.keys() - NOTES)
    return f"wrong: {listed(wrong)}" if wrong else "nothing wrong was found"


def show(script: str, reports: list[dict], lines: Lines, findings: Findings) -> None:
    """Print the table, the findings, and the verdict."""
    if all(reports):
        nodes = plural(len({report["host"] for report in reports}), "node")
        steps = plural(min(len(report["steps"]) for report in reports), "step")
        wrappers = listed(reports[0]["wrappers"]) or "no known wrapper"
        tensors = len(reports[0]["before"]["parameters"]) + len(reports[0]["shards"])
        print(f"{script}: {plural(len(reports), 'rank')} on {nodes}, {steps}; {wrappers}; "
              f"{plural(tensors, 'tensor')}")
    for what, seen in lines:
        print(f"  {what:30} {seen}")
    for key in sorted(findings, key=NOTES.__contains__):
        symptom, *advice = explain(key).split("\n")
        where = f" ({findings[key]})" if findings[key] else ""
        kind = "note" if key in NOTES else "WRONG"
        print("\n".join([f"{kind}: {symptom}{where}", *advice]))
    print(f"verdict: {verdict(findings)}", flush=True)
