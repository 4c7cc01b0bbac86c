"""What agree.py concludes from what it saw of each rank: the lines of its table, and the findings."""

from collections import Counter
from statistics import median
from typing import NamedTuple

SAME = 1e-3  # of gradients: rounding of fp32, and of another order of summation; a mistake differs by more than a tenth
FACTOR = 0.02  # how near a factor has to be to 1, to the number of ranks, or to one over that
SAME_HALF = 3e-2  # where gradients have 8 or 11 bits


class Finding(NamedTuple):
    """What --explain and the page say of it."""
    symptom: str
    cause: str
    cure: str
    note: bool = False  # worth knowing, no mistake by itself


FINDINGS = {
    "alone": Finding(
        "each process trains alone, as if it were the only one",
        "nothing in the script asks the launcher which rank it is",
        "init_process_group and DDP, hvd.init, or deepspeed.initialize; chapter 3 shows each line"),
    "weights": Finding(
        "the ranks begin with different weights",
        "each rank has drawn its own and nobody has broadcast one's, or they were drawn after the wrapper was made",
        "wrap the model when it is ready, or broadcast rank 0's parameters before the first step"),
    "apart": Finding(
        "the ranks' weights drift apart",
        "the optimizer has another state on each rank, or something besides the optimizer changes the weights",
        "the same optimizer on all ranks; load its state on all of them, or on none"),
    "own gradients": Finding(
        "each rank takes its own gradients: there are as many trainings as ranks",
        "the wrapper of the model (with Horovod: of the optimizer) is missing, or is bypassed by `model(x)` or "
        "`ddp.module(x)` instead of `ddp(x)`, or `no_sync` stays on",
        "call the wrapped model, and let the last backward before each step average; with Horovod, take the step of "
        "`hvd.DistributedOptimizer`"),
    "one rank's": Finding(
        "all ranks take the gradients of one of them, and the others' images are lost",
        "gradients are broadcast, not averaged",
        "all-reduce them and divide by the number of ranks, or let DDP"),
    "sum": Finding(
        "the ranks' gradients are summed, not averaged: as many times too large as there are ranks",
        "an all-reduce without a division, or op=Sum; Adam hides it, SGD does not",
        "divide by the number of ranks, or op=AVG; or, where the sum is meant, divide the learning rate"),
    "twice": Finding(
        "the ranks' gradients are averaged twice: as many times too small as there are ranks",
        "a division of the gradients beside that of DDP or Horovod (or one for as many accumulated batches)",
        "divide once"),
    "rates": Finding(
        "the optimizers' learning rates differ between the ranks",
        "a rate that is computed from the rank, or a schedule that follows a rank's own loss",
        "compute it from what all ranks have; all-reduce the loss before the schedule sees it"),
    "part": Finding(
        "some parameters' gradients are averaged, others are each rank's own",
        "the wrapper does not know these parameters: they were made after it, belong to another module, or are ignored",
        "make the whole model before it is wrapped; wrap every model that is trained"),
    "other gradients": Finding(
        "what the optimizer takes is neither the average of the ranks' gradients nor any rank's own",
        "something changes the gradients on a rank: clipping before they are averaged, or afterwards by a limit of its "
        "own; noise; a scale",
        "average first; clip, unscale and the like afterwards, on all ranks alike"),
    "same data": Finding(
        "all ranks train on the same samples",
        "no sampler deals them out, and all ranks shuffle with one seed",
        "sampler=DistributedSampler(dataset) instead of shuffle=True"),
    "overlap": Finding(
        "ranks train on samples that others train on, too: an epoch has some several times, and may lack others",
        "shuffle=True without a sampler, with another seed on each rank; or each rank has split or ordered the data by "
        "a seed of its own, and a DistributedSampler deals them out",
        "sampler=DistributedSampler(dataset) instead of shuffle=True; one seed for random_split and the sampler"),
    "sampler": Finding(
        "the sampler deals for another number of ranks than train",
        "its num_replicas and rank are of something else: typed in, or asked before the ranks met",
        "DistributedSampler(dataset) after init_process_group; with Horovod num_replicas=hvd.size(), rank=hvd.rank()"),
    "order": Finding(
        "each epoch has the same order",
        "sampler.set_epoch is not called: DistributedSampler shuffles by its seed and the epoch that it was told",
        "sampler.set_epoch(epoch) at the start of each epoch; a training of one epoch needs none"),
    "batches": Finding(
        "the ranks have unequal numbers of batches: those with more wait at the end of the epoch, until the time-out",
        "the data set is divided unequally, and Join is not used",
        "DistributedSampler, which gives all ranks equally many, or torch.distributed.algorithms.Join"),
    "steps": Finding(
        "some ranks have made fewer optimizer steps than others",
        "unequal data, or a condition that only some ranks fulfil",
        "let all ranks decide by a value that all have, such as an all-reduced one"),
    "one GPU": Finding(
        "two ranks are on one GPU",
        "`cuda` without set_device is GPU 0 for every rank",
        "torch.cuda.set_device(local_rank % torch.cuda.device_count()) before the model is moved"),
    "other GPU": Finding(
        "a rank's model is on another GPU than its current one",
        "no set_device, or one after the model was moved: DDP trains rightly, but ranks may also take memory on GPU 0",
        "torch.cuda.set_device(local_rank) first, then .to('cuda')", note=True),
    "hang": Finding(
        "the ranks wait for each other for ever",
        "one of them calls other collectives than the others, or none: a condition, an exception that the script "
        "catches, or a loop's end that only some ranks meet",
        "look at the lines that are named: all ranks have to come to the same calls in the same order"),
    "sequence": Finding(
        "the ranks call different collectives",
        "a condition on the rank, around a call that all have to make",
        "take the call out of the condition; print or save under `rank == 0`, and communicate outside"),
    "numbers": Finding(
        "the ranks draw the same items by their numbers, and what they are given cannot be compared, or differs",
        "a data set that makes its items up as it goes, with another seed on each rank; or one that all ranks share, "
        "and no sampler deals it out",
        "in the second case sampler=DistributedSampler(dataset) instead of shuffle=True", note=True),
    "other data": Finding(
        "each rank has another data set, and a DistributedSampler deals it a part of its own",
        "data that are drawn without a seed, or listed in another order on each rank",
        "one seed before the data are made, sorted names; or shuffle=True, if each rank has its own share", note=True),
    "scaled": Finding(
        "the gradients are the mean of the ranks', and a factor beside",
        "clipping (which hides whether the mean or the sum is clipped), a loss scale that is taken out again, or "
        "gradients that are divided by the accumulated batches",
        "nothing, if one of these is meant; else look for a second division", note=True),
    "buffers": Finding(
        "buffers differ between the ranks",
        "BatchNorm's statistics are of each rank's own images",
        "nothing: save rank 0's; torch.nn.SyncBatchNorm makes them one", note=True),
    "random": Finding(
        "all ranks draw the same random numbers: dropout or augmentation does the same on each",
        "torch.manual_seed with the same number on every rank; without any, each draws its own",
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
        "fewer ranks a node; a trial may be slow", note=True),
    "unseen": Finding(
        "the gradients could not be compared",
        "nothing meets them here: the first FSDP, Adasum, a hook of DDP's that compresses, a wrapper that is bypassed",
        "the line on weights says what was compared instead; of FSDP, fully_shard is seen", note=True),
}
NOTES = {key for key, finding in FINDINGS.items() if finding.note}
FOLLOWS = {  # what another finding brings about is not said again
    "apart": {"own gradients", "part", "other gradients", "rates"}, "weights": {"alone"}, "own gradients": {"alone"},
    "sampler": {"alone"}, "same data": {"alone", "sampler"}, "overlap": {"alone", "sampler"}, "order": {"alone"},
    "batches": {"sampler"}, "hang": {"sequence"}, "batch": {"batches"}, "numbers": {"same data", "alone"}}


def numbers(found):
    return ", ".join(map(str, found))


def plural(count, word):
    return f"{count} {word}{'s' * (count != 1)}"


def ranks_text(which, ranks):
    return "all ranks" if len(which) == ranks else f"rank{'s' * (len(which) > 1)} {numbers(which)}"


# Weights.

def differing(states):
    """{name: the ranks that have not what most have} of dicts of fingerprints; all ranks, where each has another."""
    found = {}
    for name in states[0]:
        values = [state.get(name) for state in states]
        if len(set(values)) > 1:
            value, times = Counter(values).most_common(1)[0]
            others = [rank for rank, other in enumerate(values) if other != value]
            found[name] = others if times > 1 else list(range(len(values)))
    return found


def first_of(apart, all_names, ranks):
    name, which = next(iter(apart.items()))
    return f"{len(apart)} of {plural(len(all_names), 'tensor')}, such as {name}, on {ranks_text(which, ranks)}"


def judge_weights(reports):
    """([(what, what is seen)], {finding: where}) of parameters and buffers."""
    ranks, found = len(reports), {}
    shards = len(reports[0]["shards"])
    before = [report["before"]["parameters"] for report in reports]
    kept = f"; {plural(shards, 'tensor')} of which each rank has another shard" if shards else ""
    equal = ("equal" if before[0] else "not compared") + kept

    apart = differing(before)
    if apart:
        found["weights"] = first_of(apart, before[0], ranks)
    steps = min(len(report["steps"]) for report in reports)
    rates = [[step["rates"] for step in report["steps"][:steps]] for report in reports]
    if any(rate != rates[0] for rate in rates):
        number = next(number for number in range(steps) if len({tuple(rate[number]) for rate in rates}) > 1)
        found["rates"] = f"step {number + 1}: {numbers(f'{rate[number][0]:.4g}' for rate in rates)}"
    for number in range(steps):
        after = [report["steps"][number]["after"]["parameters"] for report in reports]
        moved = differing(after)
        if moved and not apart:
            found["apart"] = f"since step {number + 1}: {first_of(moved, after[0], ranks)}"
            break
    buffers = differing([report["steps"][-1]["after"]["buffers"] for report in reports])
    if buffers:
        found["buffers"] = f"{len(buffers)}, such as {next(iter(buffers))}"
    return [("weights before step 1", found.get("weights", equal)),
            (f"weights after {plural(steps, 'step')}", "different" if apart else found.get("apart", equal))], found


# Gradients: projections are linear, so those of a mean are the mean of those of what it is of.

def vector(step, key, names):
    return [number for name in names for number in step[key][name]]


def mean_of(vectors):
    return [sum(column) / len(vectors) for column in zip(*vectors)]


def fit(one, other):
    """The factor s and what is left of `one` beside s times `other`, relative to `one`."""
    square = sum(b * b for b in other)
    factor = sum(a * b for a, b in zip(one, other)) / square if square else 0.0
    size = sum(a * a for a in one) ** 0.5
    left = sum((a - factor * b) ** 2 for a, b in zip(one, other)) ** 0.5
    return factor, left / size if size else 0.0


def alike(one, other, tolerance):
    return fit(one, other)[1] < tolerance


def joined(steps, shards):
    """The ranks' steps, where the gradients of shards are those of the whole tensors: the sum over the ranks' parts."""
    whole = {name: [sum(column) for column in zip(*(step["final"][name] for step in steps))] for name in shards}
    return [step | {"final": step["final"] | whole} for step in steps]


def kind_of(local, final, tolerance):
    """(a finding or "mean", where) for all ranks' own gradients and what the optimizers take, each as one vector."""
    ranks, mean = len(local), mean_of(local)
    fits = [fit(one, mean) for one in final]
    if all(left < tolerance for _, left in fits):
        factors = [factor for factor, _ in fits]
        factor = median(factors)
        if max(factors) - min(factors) > FACTOR * abs(factor):
            return "other gradients", f"the mean times {numbers(f'{each:.4g}' for each in factors)}"
        for kind, expected in ("mean", 1), ("sum", ranks), ("twice", 1 / ranks):
            if abs(factor - expected) < FACTOR * expected:
                return kind, f"a factor of {factor:.3g} beside the mean"
        return "scaled", f"the mean times {factor:.4g}"
    leaders = [rank for rank in range(ranks) if all(alike(one, local[rank], tolerance) for one in final)]
    if leaders:
        return "one rank's", f"those of rank {leaders[0]}"
    if all(alike(one, own, tolerance) for one, own in zip(final, local)):
        return "own gradients", ""
    return "other gradients", ""


def judge_gradients(reports):
    """([(what, what is seen)], {finding: where}) of the gradients in each step."""
    hook = reports[0]["hook"]
    tolerance = SAME_HALF if hook or any(report["half"] for report in reports) else SAME
    seen = {}  # {the tensors of a step: [(number of the step, finding, where)]}
    for number, steps in enumerate(zip(*(report["steps"] for report in reports)), 1):
        names = sorted(set.intersection(*(set(step[key]) for step in steps for key in ("local", "final"))))
        if not names:
            continue
        steps = joined(steps, set(reports[0]["parts"]) & set(names))

        def kind(names, steps=steps):
            return kind_of(*([vector(step, key, names) for step in steps] for key in ("local", "final")), tolerance)
        said, where = kind(names)
        named = names
        if said == "other gradients":
            own = [name for name in names if kind([name])[0] == "own gradients"]
            said, named = ("part", own) if own and len(own) < len(names) else (said, names)
        where = where or f"such as {named[0]}"
        seen.setdefault(tuple(names), []).append((number, said, where))
    kinds, found = Counter(), {}
    for steps in seen.values():
        always = len({said for _, said, _ in steps}) == 1
        for number, said, where in steps:  # clipping may be by any factor in a step; a mistake is the same in each
            said = said if always or said not in ("sum", "twice") else "scaled"
            kinds[said] += 1
            found.setdefault(said, f"{where}, since step {number}")
    found.pop("mean", None)
    if hook and "other gradients" in found:  # PowerSGD and the like
        found["unseen"] = f"DDP's hook {hook} changes them: {found.pop('other gradients')}"
    text = {"mean": "the mean of the ranks' own", "scaled": "their mean times a factor",
            "own gradients": "each rank's own", "sum": "the sum of the ranks' own"}
    if not kinds:
        found["unseen"] = ""
    return [("gradients the optimizer takes", numbers(text.get(kind, kind) for kind in kinds) or "not seen")], found


# Data.

def judge_loader(loaders, joins=False):
    """(what is seen or "", {finding: where}) of one DataLoader, on each rank."""
    ranks, found = len(loaders), {}
    batches = [loader["batches"] for loader in loaders]
    if len(set(batches)) > 1 and not joins:
        found["batches"] = f"{numbers(batches)} an epoch on ranks 0 to {ranks - 1}"
    if all("ranks" in loader for loader in loaders):
        if any(loader["ranks"] != ranks for loader in loaders):
            found["sampler"] = f"for {plural(loaders[0]['ranks'], 'rank')}, and {ranks} train"
        drawn = loaders[0]["drawn"]
        if loaders[0]["shuffle"] and len(drawn) > len(set(drawn)):
            found["order"] = "seen in two epochs"
        elif loaders[0]["shuffle"] and loaders[0]["forgets"]:
            found["order"] = "no set_epoch within the loop over the epochs"
        if len({loader["like"] for loader in loaders}) > 1:
            found["other data"] = ""
        elif len({loader["part"] for loader in loaders}) > 1:
            found["overlap"] = "the DistributedSampler deals out another split of the data on each rank"
    first = [set(loader["epochs"][0]) for loader in loaders]
    if not all(first) or len({loader["like"] for loader in loaders}) > 1:
        return "", found  # a stream; or each rank has data of its own, and its numbers say nothing
    common = set.intersection(*first)
    several = [item for item, times in Counter(item for items in first for item in items).items() if times > 1]
    repeated = max(2 * ranks, sum(map(len, first)) - loaders[0]["items"])  # so that all have as many
    sure = all(loader["holds"] for loader in loaders)  # else the same number may be another item on each rank
    if min(map(len, first)) == len(common):
        found["same data" if sure else "numbers"] = f"items {numbers(sorted(common)[:4])}, ... on each rank"
    elif all(loader["whole"] for loader in loaders):
        found["overlap" if sure else "numbers"] = f"each rank goes through all {loaders[0]['items']:,} items"
    elif "overlap" not in found and len(several) > repeated and not any(loader["again"] for loader in loaders):
        found["overlap" if sure else "numbers"] = f"{len(several)} of {sum(map(len, first))} drawn items"
    drawn = numbers(sorted({len(items) for items in first}))
    return f"{drawn} items drawn on each rank, {len(several)} on several", found


def judge_data(reports):
    """([(what, what is seen)], {finding: where}): by the items' numbers, else by what the models are given."""
    found, seen = {}, ""
    used = {name for report in reports for name, loader in report["loaders"].items() if loader["used"]}
    for name in sorted(used):
        loaders = [report["loaders"].get(name) for report in reports]
        if all(loaders):
            said, more = judge_loader(loaders, any(report["joins"] for report in reports))
            seen, found = seen or said, found | more
    given = [{row for batch in report["rows"] or report["loaded"] for row in batch} for report in reports]
    if not found.keys() & {"same data", "overlap"} and (not seen or "numbers" in found) and all(given):
        common = set.intersection(*given)
        if len(common) > min(map(len, given)) / 2:
            found["same data"] = f"{len(common)} of the {min(map(len, given))} samples that the models are given"
        seen = f"{numbers(sorted(set(map(len, given))))} samples given on each rank, {len(common)} on all"
    sizes = [[len(batch) for batch in report["rows"] or report["loaded"]] for report in reports]
    unequal = next((column for column in zip(*sizes) if len(set(column)) > 1), None)
    if unequal:
        found["batch"] = f"{numbers(unequal)} samples on ranks 0 to {len(reports) - 1}"
    seen = seen or "no DataLoader, no batch: not seen"
    return [("data", "see below" if found.keys() & {"same data", "overlap"} else seen)], found


# Machine.

def judge_devices(reports):
    found = {}
    places = [(report["host"], report["gpu"]) for report in reports]
    twice = [place for place, times in Counter(places).items() if times > 1 and place[1]]
    if twice:
        found["one GPU"] = ranks_text([rank for rank, place in enumerate(places) if place == twice[0]], len(reports))
    for rank, report in enumerate(reports):
        if report["current"] and report["current"] != report["device"]:
            found["other GPU"] = f"rank {rank}: the model is on {report['device']}, {report['current']} is current"
    threads, cores = Counter(), {}
    for report in reports:
        threads[report["host"]] += report["threads"]
        cores.setdefault(report["host"], set()).update(report["cores"])
    for host, count in threads.items():
        if count > len(cores[host]) and reports[0]["device"] == "cpu":
            single = all(report["threads"] == 1 for report in reports if report["host"] == host)
            found["cores" if single else "threads"] = f"{host}: {count} threads, {plural(len(cores[host]), 'core')}"
    randoms = [report["random"] for report in reports]
    if len({seed["torch"] for seed in randoms}) == 1 and randoms[0]["draws"]:
        found["random"] = randoms[0]["draws"]
    devices = numbers(sorted({report["device"] for report in reports}))
    return [("devices", f"{devices}; {plural(reports[0]['threads'], 'thread')} a rank")], found


# All.

def judge(reports: list[dict]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """([(what, what is seen)], {finding: where}) of the reports of all ranks, in their order."""
    lines, found = [], {}
    steps = [len(report["steps"]) for report in reports]
    if len(set(steps)) > 1 and not any(report["joins"] for report in reports):
        found["steps"] = f"{numbers(steps)} on ranks 0 to {len(steps) - 1}"
    for part in judge_weights, judge_gradients, judge_data, judge_devices:
        said, more = part(reports)
        lines, found = lines + said, found | more
    if not any(report["met"] for report in reports):
        found["alone"] = ""
    return lines, causes(found)


def causes(found):
    """The findings without those that follow from another."""
    return {key: where for key, where in found.items() if not FOLLOWS.get(key, set()) & found.keys()}


def judge_hang(now: list[tuple[dict, dict]], seconds: float) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """The same of ranks that wait for ever: of each its report, if it has ended, and its last sign of life."""
    places, lines = {}, []
    for rank, (report, alive) in enumerate(now):
        here = "ended" if report else f"at {alive['stack'][0]}" if alive else "at the start"
        places.setdefault(here, []).append(rank)
        lines.append((f"rank {rank}", " < ".join(alive["stack"]) if alive and not report else here))
    rarest = sorted(places.items(), key=lambda place: len(place[1]))  # where most are is rarely the mistake
    said = "; ".join(f"{here}: rank{'s' * (len(which) > 1)} {numbers(which)}" for here, which in rarest)
    odd = odd_one([alive for _, alive in now if alive])
    return lines, {"sequence": odd} if odd else {"hang": f"{said}, for {seconds:.0f} s"}


def odd_one(alive):
    """Where the ranks' sequences of collectives part, in words; None if they do not, as far as they were told."""
    first = max(rank["first"] for rank in alive)
    last = min(rank["first"] + len(rank["calls"]) for rank in alive)
    for number in range(first, last):
        calls = [rank["calls"][number - rank["first"]] for rank in alive]
        if len({call.split(" at ")[0] for call in calls}) > 1:
            return "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
    return None


def why_not(reports: list[dict]) -> str:
    """Why nothing can be judged."""
    if any(report["bare"] for report in reports):
        return "trains no torch.nn.Module that was seen in training mode: nothing to compare"
    return "ended before a step of a PyTorch optimizer: nothing to compare"


# Words.

def explain(key: str) -> str:
    finding = FINDINGS[key]
    return f"{key}: {finding.symptom}\n  cause: {finding.cause}\n  cure: {finding.cure}"


def table() -> str:
    """The text of a Markdown table of all findings."""
    rows = ["| name | what it says | cause | cure |", "|---|---|---|---|"]
    for key, finding in FINDINGS.items():
        name = f"*{key}* (note)" if finding.note else f"*{key}*"
        rows.append(f"| {name} | {finding.symptom} | {finding.cause} | {finding.cure} |")
    return "\n".join(rows)


def show(script: str, reports: list[dict], lines: list[tuple[str, str]], found: dict[str, str]) -> None:
    """Print the table, the findings, and the verdict."""
    if all(reports):
        hosts = len({report["host"] for report in reports})
        wrappers = numbers(reports[0]["wrappers"]) or "no known wrapper"
        tensors = len(reports[0]["before"]["parameters"]) + len(reports[0]["shards"])
        steps = min(len(report["steps"]) for report in reports)
        print(f"{script}: {plural(len(reports), 'rank')} on {plural(hosts, 'node')}, {plural(steps, 'step')}; "
              f"{wrappers}; {plural(tensors, 'tensor')}")
    for what, seen in lines:
        print(f"  {what:30} {seen}")
    for key in sorted(found, key=NOTES.__contains__):
        symptom, *advice = explain(key).split("\n")
        where = f" ({found[key]})" if found[key] else ""
        print("\n".join([f"{'note' if key in NOTES else 'WRONG'}: {symptom}{where}", *advice]))
    print(f"verdict: {verdict(found)}", flush=True)


def verdict(found: dict[str, str]) -> str:
    wrong = sorted(found.keys() - NOTES)
    return f"wrong: {numbers(wrong)}" if wrong else "nothing wrong was found"
