"""Judges the data: do the ranks train on different samples, and in another order each epoch?"""

import functools
import itertools
import operator
from collections import Counter

from .gradients import equal_own_gradients
from .messages import find_fix
from .ranks import Findings, Lines, add_note, listed, pair_steps, samples_before

FEWEST_SAMPLES = 8  # in which a tensor that is the same on all ranks is no chance


def judge_data(reports: list[dict]) -> tuple[Lines, Findings]:
    """Return the line and findings of what loaders drew, or else of the models' inputs."""
    findings, text = {}, ""
    loaders_of_ranks = shared_loaders(reports)
    for loaders in loaders_of_ranks:
        loader_text, loader_findings = judge_loader(loaders)
        text = text or loader_text
        findings = judge_sampler(loaders, loader_findings) | findings
        findings |= judge_order(loaders[0], reports[0]["end"])
    same_inputs = ""
    if not text:
        steps_of_ranks = [[samples_before(report, steps[rank])
                           for rank, report in enumerate(reports)]
                          for _, steps in pair_steps(reports)]
        batches = [[*itertools.chain(*steps)] for steps in zip(*steps_of_ranks)]
        text, input_findings = judge_samples(batches, "given to the models")
        same_inputs = input_findings.get("same data", "")
        for rank in range(1, len(reports)):  # a seed of step + rank: others share fewer samples
            pair = [batches[0], batches[rank]]
            details = judge_samples(pair, "given to the models")[1].get("same data")
            in_one_step = sum(count_shared([step[0], step[rank]]) for step in steps_of_ranks)
            if details and in_one_step < count_shared(pair) / 2:
                findings["overlap"] = f"{details} of ranks 0 and {rank}, in other steps"
                same_inputs = ""
                break
    judge_equal_gradients(reports, text, same_inputs, findings)
    if not findings.keys() & {"same data", "overlap"}:
        judge_noise(reports, loaders_of_ranks, bool(text), findings)
    if not text:
        add_note(findings, "without a DataLoader, and without tensors or lists among a model's "
                 "arguments, agree cannot tell whether the ranks share samples")
    return [("data", text or "no DataLoader, no batch: not seen")], findings


def shared_loaders(reports):
    """Return [[the facts of a loader on each rank]] of the loaders that all ranks have."""
    ranks = [{loader["name"]: loader for loader in report["loaders"]} for report in reports]
    return [[loaders[name] for loaders in ranks] for name in ranks[0]
            if all(name in loaders for loaders in ranks)]


def judge_loader(loaders: list[dict]) -> tuple[str, Findings]:
    """Return (a line's text or "", findings) for one DataLoader, given its facts on each rank."""
    world_size, first, findings = len(loaders), loaders[0], {}
    batches = [loader["batches"] for loader in loaders]
    drawn = [set(loader["epochs"][0]["indices"]) if loader["epochs"] else set()
             for loader in loaders]
    no_replacement = all(loader["without_replacement"] for loader in loaders)
    probes = [loader["probes"] for loader in loaders]
    if all(drawn) and all(probes) and probes.count(probes[0]) == world_size:
        counts = Counter(index for indices in drawn for index in indices)
        shared = sum(count > 1 for count in counts.values())
        common = set.intersection(*drawn)
        # A DistributedSampler repeats samples, so that all ranks get equally many
        padding = max(2 * world_size, sum(map(len, drawn)) - first["dataset_size"])
        text = (f"{listed(sorted(set(map(len, drawn))))} samples drawn on each rank, "
                f"{shared} of them on more than one")
        same_content = judge_samples(batches, "drawn")[1]
        if min(map(len, drawn)) == len(common) > 1 and (no_replacement or same_content):
            same = ", whose samplers have one rank" * first["is_distributed"]
            findings["same data"] = f"samples {listed(sorted(common)[:4])}, ... on each rank{same}"
        elif shared > padding and no_replacement:
            findings["overlap"] = f"{shared} of {sum(map(len, drawn))} drawn samples"
        elif shared > padding:
            add_note(findings, f"{shared} samples were drawn on several ranks: right if "
                     "the sampler does so on purpose, such as one with replacement")
        return text, findings or same_content
    # A stream, or different data sets, whose indices mean nothing
    text, findings = judge_samples(batches, "drawn")
    if all(probes) and {loader["shares"] for loader in loaders} == {world_size}:
        differ = sum(len(set(values)) > 1 for values in zip(*probes))
        findings = {"overlap": f"the sampler divides the places in a data set among the ranks, but "
                    f"the ranks' data sets differ: at {differ} of {len(probes[0])} places they "
                    "have other samples"}
    shared = count_common(batches)
    if no_replacement and not findings.keys() - {"note"} and shared > max(
            2 * world_size, first["dataset_size"] // 1000):
        findings["overlap"] = f"{shared} of the samples that each rank has drawn"
    return text, findings


def judge_sampler(loaders, loader_findings):
    """Return the loader's findings and that of its DistributedSampler, whose cause it may be."""
    findings, world_size = dict(loader_findings), len(loaders)
    samplers = [loader for loader in loaders if loader["is_distributed"]]
    for loader in samplers:
        shares = loader["shares"]
        if shares > world_size or (
                shares < world_size and findings.keys() - {"note"}):
            findings["sampler"] = f"num_replicas={shares}, but {world_size} share the data"
    if len(samplers) < world_size or {loader["shares"] for loader in loaders} != {world_size}:
        return findings
    for number, epochs in enumerate(zip(*(loader["epochs"] for loader in loaders)), 1):
        seeds = [epoch.get("seed") for epoch in epochs]
        if len(set(seeds)) > 1:
            findings["sampler"] = (
                f"in epoch {number} they shuffle with seed + epoch = {listed(seeds)} on ranks 0 to "
                f"{len(seeds) - 1}, so that some samples are drawn on several ranks, and others on "
                "none")
            break
    return findings


def judge_order(loader, end):
    """Return the findings of the order of a DistributedSampler's epochs."""
    findings = {}
    shuffled = [epoch for epoch in loader["epochs"]
                if len(epoch["indices"]) > 2 and epoch["shuffled"]]
    for epoch, other in itertools.combinations(shuffled, 2):
        indices, others = epoch["indices"], other["indices"]
        is_equal = indices[:len(others)] == others[:len(indices)]
        if is_equal and epoch["sampler"] == other["sampler"]:
            findings["order"] = "a DistributedSampler's"
    if len(shuffled) == 1 and not shuffled[0]["is set"] and end != "ended":
        add_note(findings, "set_epoch() was not called before the one epoch that was seen: without "
                 "it, all epochs have the same order; --seconds 600 sees more")
    return findings


def count_common(batches):
    """Return the number of samples that all ranks have, or 0 if samples repeat on a rank."""
    ranks = [[sample for batch in rank for sample in batch] for rank in batches]
    if any(len(set(rank)) < len(rank) for rank in ranks):
        return 0
    return len(set.intersection(*map(set, ranks)))


def count_samples(batches):
    """Return how often each sample is in each rank's batches."""
    return [Counter(sample for batch in rank for sample in batch) for rank in batches]


def count_shared(batches):
    """Return the number of samples that are on all ranks, counted as often as on each."""
    return sum(functools.reduce(operator.and_, count_samples(batches)).values())


def judge_samples(batches: list[list[list[str]]], verb: str) -> tuple[str, Findings]:
    """Return (a line's text or "", findings) for the checksums of the ranks' samples.

    batches: the checksums of each rank's batches, of each sample or of a whole batch.
    """
    counts = count_samples(batches)
    if not all(counts):
        return "", {}
    totals = [sum(count.values()) for count in counts]
    shared = count_shared(batches)
    # Samples that repeat on a rank may be on several ranks by chance: compare whole batches
    distinct = min(len(count) / total for count, total in zip(counts, totals)) > 0.9
    same = shared > min(totals) / 2 if distinct else len(set(map(str, batches))) == 1
    unit = "samples" if any(len(batch) > 1 for rank in batches for batch in rank) else "batches"
    details = f"{shared} of the {min(totals)} {unit} {verb}"
    text = f"{listed(sorted(set(totals)))} {unit} {verb} on each rank, {shared} on all"
    return text, {"same data": details} if same else {}


def judge_noise(reports, loaders_of_ranks, samples_differ, findings):
    """Add the finding of noise that is equal on all ranks, or a note of equal random numbers.

    Their use is known in dropout, and while a data set's samples are read.
    """
    sources = equal_random_numbers(reports)
    gpu = "the GPU's" if reports[0]["device"] != "cpu" else "PyTorch's"
    noises = ["dropout"] if reports[0]["dropout"] and gpu in sources else []
    for loaders in loaders_of_ranks:
        seeds, draws = [loader["seeds"] for loader in loaders], loaders[0]["draws"]
        if draws and all(seeds) and all(len(set(epoch)) == 1 for epoch in zip(*seeds)):
            noises.append("the data set by the workers' random numbers")
        elif not any(seeds):
            noises += [f"the data set by {name} random numbers"
                       for name in draws if name in sources]
    noises += equal_inputs(reports)
    if noises and samples_differ:
        findings["same noise"] = listed(noises)
    elif sources:
        add_note(findings, f"{listed(sources)} random numbers are the same on all ranks: right for "
                 "a choice that all share, wrong for augmentation, noise or dropout. To do then: "
                 + find_fix("same noise", reports[0], ""))


def equal_random_numbers(reports):
    """Return the names of the random numbers that the ranks draw, and that are the same on all."""
    names, steps = [], pair_steps(reports)
    each_step = len({number for number, _ in steps})
    for name in steps[0][1][0]["random"]:
        states = [{step["random"].get(name) for step in rank_steps} for _, rank_steps in steps]
        if all(len(ranks) == 1 for ranks in states) and (
                len(set.union(*states)) >= each_step > 1):
            names.append(name)
    return names


def equal_inputs(reports):
    """Return which tensors of the models' inputs are random and equal on all ranks, as texts.

    Such are the times of a diffusion model. Random: they repeat neither in a batch nor by step.
    """
    steps = pair_steps(reports)
    ranks = [[sample.split() for _, rank_steps in steps
              for batch in samples_before(report, rank_steps[rank]) for sample in batch]
             for rank, report in enumerate(reports)]
    if (len({(len(rows), *map(len, rows)) for rows in ranks}) > 1 or len(steps) == 1
            or len(ranks[0]) < FEWEST_SAMPLES):
        return []
    columns = [list(zip(*rows)) for rows in ranks]
    return [f"tensor {number} of the models' inputs"
            for number, values in enumerate(zip(*columns), 1)
            if values.count(values[0]) == len(values) and len(set(values[0])) > len(values[0]) / 2]


def judge_equal_gradients(reports, text, same_inputs, findings):
    """Add findings of optimizers whose own gradients are equal on all ranks."""
    is_equal = equal_own_gradients(reports)
    optimizers = [optimizer for optimizer, equal in is_equal.items() if equal]
    details = f"the ranks' own gradients of {listed(optimizers)} are equal"
    drawn = [optimizer for optimizer in optimizers if has_same_inputs(reports, optimizer)]
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


def has_same_inputs(reports, optimizer):
    """Return True if an optimizer's models got the same inputs on all ranks, in each step."""
    inputs = [[samples_before(report, steps[rank])
               for _, steps in pair_steps(reports) if steps[0]["what"] == [optimizer]]
              for rank, report in enumerate(reports)]
    return all(inputs[0]) and inputs.count(inputs[0]) == len(inputs)
