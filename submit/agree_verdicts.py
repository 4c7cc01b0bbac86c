"""What agree.py concludes from what it saw of each rank: the lines of its table, and the findings."""

from collections import Counter
from statistics import median
from typing import NamedTuple

SAME = 1e-3  # of gradients: rounding of fp32, and of another order of summation; a mistake differs by more than a tenth
SAME_HALF = 3e-2  # where gradients have 8 or 11 bits
STRAGGLER = 2  # times the time of the others

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
        "each rank has drawn its own and nobody has broadcast one's, or they were drawn or loaded after the wrapper was made",
        "wrap the model when it is ready, or broadcast rank 0's parameters before the first step"),
    "apart": Finding(
        "the ranks' weights drift apart, though they take the same gradients",
        "the optimizer has another learning rate or state on each rank, or something else changes the weights",
        "the same optimizer on all ranks; load its state on all of them, or on none"),
    "own gradients": Finding(
        "each rank takes its own gradients: there are as many trainings as ranks",
        "the wrapper is missing, or is by-passed by `model(x)` or `ddp.module(x)` in the place of `ddp(x)`, or `no_sync` "
        "stays on",
        "call the wrapped model, and let the last backward before each step average"),
    "one rank's": Finding(
        "all ranks take the gradients of one of them, and the others' images are lost",
        "gradients are broadcast, not averaged",
        "all-reduce them and divide by the number of ranks, or let DDP"),
    "sum": Finding(
        "the ranks' gradients are summed, not averaged: as many times too large as there are ranks",
        "an all-reduce without a division, or op=Sum; Adam hides it, SGD does not",
        "divide by the number of ranks, or op=AVG; or mean the sum, and divide the learning rate"),
    "twice": Finding(
        "the ranks' gradients are averaged twice: as many times too small as there are ranks",
        "a division beside that of DDP or Horovod",
        "divide once"),
    "part": Finding(
        "some parameters' gradients are averaged, others are each rank's own",
        "the wrapper does not know these parameters: they were made after it, belong to another module, or are ignored",
        "make the whole model before it is wrapped; wrap every model that is trained"),
    "other gradients": Finding(
        "what the optimizer takes is neither the average of the ranks' gradients nor any rank's own",
        "something changes the gradients on a rank before they are averaged: clipping, noise, a scale of its own",
        "average first; clip, unscale and the like afterwards, on all ranks alike"),
    "same data": Finding(
        "all ranks train on the same samples",
        "no sampler deals them out, and all ranks shuffle with one seed",
        "sampler=DistributedSampler(dataset) in the place of shuffle=True"),
    "overlap": Finding(
        "each rank draws from the whole data set in an order of its own: in an epoch some samples meet several ranks, "
        "some none",
        "shuffle=True without a sampler, with another seed on each rank",
        "sampler=DistributedSampler(dataset) in the place of shuffle=True"),
    "sampler": Finding(
        "the sampler deals for another number of ranks than train",
        "its num_replicas and rank are of something else, or it was made before the ranks met",
        "DistributedSampler(dataset) after init_process_group; with Horovod num_replicas=hvd.size(), rank=hvd.rank()"),
    "order": Finding(
        "each epoch has the same order",
        "sampler.set_epoch is not called: DistributedSampler shuffles by its seed and the epoch that it was told",
        "sampler.set_epoch(epoch) at the start of each epoch; a training of one epoch needs none"),
    "batches": Finding(
        "the ranks have unequal numbers of batches: those with more wait for ever at the end of the epoch",
        "the data set is divided unequally",
        "drop_last=True in the sampler, or torch.distributed.algorithms.Join"),
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
        "`.to('cuda:0')` on every rank, or set_device after the model was moved",
        "torch.cuda.set_device(local_rank) first, then .to('cuda')"),
    "hang": Finding(
        "the ranks wait for each other for ever",
        "one of them calls other collectives than the others, or none: a condition, an exception, or a loop's end that "
        "only some ranks meet",
        "look at the lines that are named: all ranks have to come to the same calls in the same order"),
    "sequence": Finding(
        "the ranks call different collectives",
        "a condition on the rank, around a call that all have to make",
        "take the call out of the condition; print or save under `rank == 0`, and communicate outside"),
    "scaled": Finding(
        "the gradients are the mean of the ranks', and a factor beside",
        "clipping, loss scaling, or a loss that is divided for accumulation",
        "nothing, if one of these is meant; else look for a second division", note=True),
    "buffers": Finding(
        "buffers differ between the ranks",
        "BatchNorm's statistics are of each rank's own images",
        "nothing: save rank 0's; torch.nn.SyncBatchNorm makes them one", note=True),
    "random": Finding(
        "all ranks draw the same random numbers: dropout or augmentation does the same on each",
        "one seed for all, or none, which in PyTorch is one, too",
        "torch.manual_seed(seed + rank) once the weights are equal", note=True),
    "batch": Finding(
        "the ranks' batches are of unequal size in a step",
        "the last batch of an epoch, or a division with a rest",
        "drop_last=True, or weigh each rank's loss: a mean of means is not the mean", note=True),
    "threads": Finding(
        "the ranks of a node have more threads than it has cores",
        "each rank takes all cores",
        "OMP_NUM_THREADS=1, or the cores divided by the ranks", note=True),
    "straggler": Finding(
        "one rank computes longer than the others, which wait for it",
        "another program on its cores, a slower device, more or longer samples, work that one rank does alone",
        "look at that node; deal samples out by their length", note=True),
    "unseen": Finding(
        "the gradients could not be compared",
        "no hook meets them in this program",
        "the weights were compared, and say whether the ranks train one model", note=True),
}
NOTES = {key for key, finding in FINDINGS.items() if finding.note}
FOLLOWS = {"apart": {"own gradients", "part", "other gradients"},  # what another finding brings about is not said again
           "weights": {"alone"}, "own gradients": {"alone"}, "same data": {"alone", "sampler"}, "overlap": {"alone", "sampler"},
           "order": {"alone"}, "batches": {"sampler"}, "hang": {"sequence"}, "batch": {"batches"}}


def numbers(found):
    return ", ".join(map(str, found))


def ranks_text(which, ranks):
    return "all ranks" if len(which) == ranks else f"rank{'s' * (len(which) > 1)} {numbers(which)}"


def differing(states):
    """{name: the ranks that have not what most have} for dicts of fingerprints."""
    found = {}
    for name in states[0]:
        values = [state.get(name) for state in states]
        if len(set(values)) > 1:
            common = Counter(values).most_common(1)[0]
            found[name] = [rank for rank, value in enumerate(values) if value != common[0]] if common[1] > 1 else [
                *range(len(values))]
    return found


def vector(step, key, names):
    return [number for name in names for number in step[key].get(name, [0.0])]


def fit(one, other):
    """The factor s and what is left of `one` beside s times `other`, relative to `one`."""
    square = sum(b * b for b in other)
    factor = sum(a * b for a, b in zip(one, other)) / square if square else 0.0
    size = sum(a * a for a in one) ** 0.5
    return factor, (sum((a - factor * b) ** 2 for a, b in zip(one, other)) ** 0.5 / size if size else 0.0)


def judge_gradients(reports):
    """(what is said in the table, {finding: where})."""
    ranks, kinds, factors, where = len(reports), Counter(), [], {}
    shards = set(reports[0].get("shards", []))
    for number in range(min(len(report["steps"]) for report in reports)):
        steps = [report["steps"][number] for report in reports]
        names = sorted(set(steps[0]["local"]) & set.intersection(*(set(step["final"]) for step in steps)))
        if not names:
            continue
        for name in shards & set(names):  # each rank has a part: their projections add up to those of the whole
            whole = [sum(column) for column in zip(*(step["final"][name] for step in steps))]
            steps = [step | {"final": step["final"] | {name: whole}} for step in steps]
        local = [vector(step, "local", names) for step in steps]
        final = [vector(step, "final", names) for step in steps]
        mean = [sum(column) / ranks for column in zip(*local)]
        tolerance = SAME_HALF if any(report.get("half") for report in reports) else SAME
        fits = [fit(one, mean) for one in final]
        if all(left < tolerance for _, left in fits):
            factor = median(factor for factor, _ in fits)
            factors.append(factor)
            if abs(factor - 1) < 10 * tolerance:
                kinds["mean"] += 1
            elif abs(factor - ranks) < 10 * tolerance * ranks:
                kinds["sum"] += 1
            elif abs(factor - 1 / ranks) < 10 * tolerance / ranks:
                kinds["twice"] += 1
            else:
                kinds["scaled"] += 1
                where["scaled"] = f"the mean times {factor:.4g} in step {number + 1}"
            continue
        owns = [fit(one, own)[1] < tolerance for one, own in zip(final, local)]
        leaders = [rank for rank in range(ranks) if all(fit(one, local[rank])[1] < tolerance for one in final)]
        bad = [name for name in names if any(
            fit(vector(step, "final", [name]), [sum(c) / ranks for c in zip(*(vector(s, "local", [name]) for s in steps))]
                )[1] > 10 * tolerance for step in steps)]
        if leaders:
            kinds["one rank's"] += 1
            where["one rank's"] = f"those of rank {leaders[0]}, since step {number + 1}"
        elif all(owns):
            kinds["own gradients"] += 1
            where.setdefault("own gradients", f"since step {number + 1}, such as {names[0]}")
        else:
            some_own = [name for name in bad if all(fit(vector(step, "final", [name]), vector(step, "local", [name]))[1]
                                                    < tolerance for step in steps)]
            kind = "part" if some_own and len(some_own) < len(names) else "other gradients"
            kinds[kind] += 1
            where.setdefault(kind, f"step {number + 1}: {numbers((some_own or bad)[:3])}")
    if not kinds:
        return "not seen", {"unseen": ""}
    if kinds["sum"]:
        where["sum"] = f"factor {factors[-1]:.3g}, {ranks} ranks"
    text = {"mean": "the mean of the ranks' own", "scaled": "their mean times a factor"}
    said = numbers(text.get(kind, kind) for kind in kinds)
    return said, {kind: where.get(kind, "") for kind in kinds if kind != "mean"}


def judge_data(reports):
    """The same of the data: by the numbers of a loader's items, or by what a model is given."""
    ranks = len(reports)
    used = {name for report in reports for name, loader in report["loaders"].items() if loader["used"]}
    found = {}
    for name in sorted(used):
        loaders = [report["loaders"].get(name) for report in reports]
        if not all(loaders):
            continue
        batches = [loader["batches"] for loader in loaders]
        if len(set(batches)) > 1:
            found["batches"] = f"{numbers(batches)} batches an epoch on ranks 0 to {ranks - 1}"
        if all("ranks" in loader for loader in loaders):
            if any(loader["ranks"] != ranks for loader in loaders):
                found["sampler"] = f"for {loaders[0]['ranks']} ranks, and {ranks} train"
            drawn = [loader["drawn"] for loader in loaders][0]
            if loaders[0]["shuffle"] and (len(drawn) > len(set(drawn)) or not loaders[0]["set"]):
                found["order"] = "" if len(drawn) > len(set(drawn)) else "no set_epoch before the first epoch"
        first = [loader["epochs"][0] for loader in loaders]
        if all(first):
            sets = [set(items) for items in first]
            common = set.intersection(*sets)
            several = [item for item, times in Counter(i for items in sets for i in items).items() if times > 1]
            if min(map(len, sets)) == len(common):
                found["same data"] = f"items {numbers(sorted(common)[:4])}, ... on each rank"
            elif len(several) > ranks * 2:
                found["overlap"] = f"{len(several)} of {sum(map(len, sets))} drawn items"
            else:
                return f"{numbers(sorted({len(items) for items in sets}))} items drawn on each rank, none on two", found
    contents = [[row for batch in report["rows"] for row in batch] for report in reports]
    if not found and all(contents):
        common = set.intersection(*map(set, contents))
        if len(common) > 0.5 * min(map(len, map(set, contents))):
            found["same data"] = "by what the models are given"
        return f"{numbers(sorted({len(rows) for rows in contents}))} images given on each rank", found
    return "see below" if found else "no DataLoader, no batch: not seen", found


def judge(reports):
    """([(what, what is seen)], {finding: where}) of the reports of all ranks, in their order."""
    ranks, lines, found = len(reports), [], {}
    shards = len(reports[0].get("shards", []))
    whole = len(reports[0]["before"]["parameters"])
    kept = f"; {shards} tensors are shards, of which each rank has another part" if shards else ""
    equal = "equal" if whole else "not compared"
    steps = [len(report["steps"]) for report in reports]
    if len(set(steps)) > 1:
        found["steps"] = f"{numbers(steps)} on ranks 0 to {ranks - 1}"

    before = [report["before"]["parameters"] for report in reports]
    apart = differing(before)
    if apart:
        name, which = next(iter(apart.items()))
        found["weights"] = f"{len(apart)} of {len(before[0])} tensors, such as {name}, on {ranks_text(which, ranks)}"
    lines.append(("weights before step 1", (found["weights"] if apart else equal) + kept))
    since = None
    for number in range(min(steps)):
        after = [report["steps"][number]["after"]["parameters"] for report in reports]
        moved = differing(after)
        if moved and not apart:
            name, which = next(iter(moved.items()))
            since = f"since step {number + 1}: {len(moved)} of {len(after[0])}, such as {name}, on {ranks_text(which, ranks)}"
            found["apart"] = since
            break
    lines.append((f"weights after steps 1 to {min(steps)}", (since or "different" if apart or since else equal) + kept))
    buffers = differing([report["steps"][-1]["after"]["buffers"] for report in reports if report["steps"]] or [{}])
    if buffers:
        found["buffers"] = f"{len(buffers)}, such as {next(iter(buffers))}"

    said, wrong = judge_gradients(reports)
    lines.append(("gradients the optimizer takes", said))
    found |= wrong
    said, wrong = judge_data(reports)
    lines.append(("data", said))
    found |= wrong
    sizes = [[len(batch) for batch in report["rows"]] for report in reports]
    if any(len(set(column)) > 1 for column in zip(*sizes)):
        found["batch"] = f"{numbers(next(c for c in zip(*sizes) if len(set(c)) > 1))} on ranks 0 to {ranks - 1}"

    randoms = [report["random"] for report in reports]
    if len({seed["torch"] for seed in randoms}) == 1 and randoms[0]["draws"]:
        found["random"] = randoms[0]["draws"]
    places = [(report["host"], report.get("gpu")) for report in reports]
    twice = [place for place, times in Counter(places).items() if times > 1 and place[1]]
    if twice:
        found["one GPU"] = ranks_text([rank for rank, place in enumerate(places) if place == twice[0]], ranks)
    for rank, report in enumerate(reports):
        if report.get("current") and report["current"] != report["device"]:
            found["other GPU"] = f"rank {rank}: the model is on {report['device']}, {report['current']} is current"
    threads = Counter()
    for report in reports:
        threads[report["host"]] += report["threads"]
    cores = {report["host"]: report["cores"] for report in reports}
    crowded = [host for host in threads if threads[host] > cores[host] and "cpu" in reports[0]["device"]]
    if crowded:
        found["threads"] = f"{crowded[0]}: {threads[crowded[0]]} threads, {cores[crowded[0]]} cores"
    lines.append(("communication of a step", communication(reports)))
    lines.append(("devices", f"{numbers(sorted({report['device'] for report in reports}))}; {reports[0]['threads']} "
                  f"thread{'s' * (reports[0]['threads'] > 1)} a rank"))
    if min(steps) > 1:
        own = [median(step["seconds"] - step["waiting"] for step in report["steps"][1:]) for report in reports]
        waits = [median(step["waiting"] for step in report["steps"][1:]) for report in reports]
        lines.append(("a step computes", f"{numbers(f'{seconds:.4f}' for seconds in own)} s, and waits for communication "
                      f"{numbers(f'{seconds:.4f}' for seconds in waits)} s"))
        slowest = max(range(ranks), key=own.__getitem__)
        others = median(own[:slowest] + own[slowest + 1:])
        if own[slowest] > STRAGGLER * others and own[slowest] - others > 0.02:
            found["straggler"] = f"rank {slowest}, {own[slowest] / others:.1f} times the others' time"
    if "own gradients" in found and not any(report["met"] for report in reports):
        found["alone"] = ""
    return lines, causes(found)


def communication(reports):
    """What rank 0 sends in its last step, by whom."""
    sent = reports[0]["steps"][-1]["sent"]
    return "; ".join(f"{what}: {calls} call{'s' * (calls > 1)}, {size:,} bytes" for what, (calls, size) in sent.items()) or (
        "none that could be seen")


def odd_one(alive):
    """Where the ranks' sequences of collectives part, in words; None if they do not, as far as they were told."""
    first = max((rank["first"] for rank in alive), default=0)
    last = min((rank["first"] + len(rank["calls"]) for rank in alive), default=0)
    for number in range(first, last):
        calls = [rank["calls"][number - rank["first"]] for rank in alive]
        if len({call.split(" at ")[0] for call in calls}) > 1:
            return "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
    return None


def why_not(reports):
    """Why no step was seen."""
    if any(report["steps"] for report in reports):
        return "trains no torch.nn.Module that was seen in training mode: nothing to compare"
    return "ended before an optimizer step of PyTorch's: nothing to compare"


def explain(key):
    finding = FINDINGS[key]
    return f"{key}: {finding.symptom}\n  cause: {finding.cause}\n  cure: {finding.cure}"


def causes(found):
    """The findings without those that follow from another."""
    return {key: where for key, where in found.items() if not FOLLOWS.get(key, set()) & found.keys()}


def show(script, ranks, reports, lines, found):
    if reports:
        wrappers = ", ".join(reports[0]["wrappers"]) or "no wrapper that is known here"
        hosts = len({report["host"] for report in reports})
        print(f"{script}: {ranks} ranks on {hosts} node{'s' * (hosts > 1)}, {min(len(r['steps']) for r in reports)} steps; "
              f"{wrappers}; {len(reports[0]['before']['parameters']) + len(reports[0].get('shards', []))} tensors")
    for what, seen in lines:
        print(f"  {what:28} {seen}")
    for key in sorted(found, key=lambda key: key in NOTES):
        symptom, *advice = explain(key).split("\n")
        print("\n".join([f"{'note' if key in NOTES else 'WRONG'}: {symptom}{f' ({found[key]})' if found[key] else ''}", *advice]))
    wrong = found.keys() - NOTES
    print(f"verdict: {'wrong: ' + ', '.join(sorted(wrong)) if wrong else 'nothing wrong was found'}", flush=True)
