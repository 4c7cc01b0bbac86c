"""What the grade of exercise 3 looks at."""

import tempfile
from pathlib import Path

import sklearn.datasets  # noqa: F401  once, before the ranks are forked
from grade import load
from scripts import (
    agree_verdicts,
    checkpoint,
    contents,
    findings,
    global_batch,
    lines,
    order,
    run_script,
    torchruns_variables,
    training,
)

RANKS = 2
REFERENCE = load(Path(__file__).with_name("solution.py"), "reference")  # for its data and its model
APART = {"own gradients", "weights", "apart", "sum", "twice", "scaled", "part", "other gradients", "one rank's"}


def watch(file):
    """Per rank what the script did, what agree.py finds in it, and what was saved."""
    places, store = torchruns_variables(RANKS)
    with tempfile.TemporaryDirectory() as folder:
        facts = run_script(file, places, [folder] * RANKS)
        saved = contents(facts)
    del store
    return {"ranks": facts, "found": findings(facts), "contents": saved}


def points(facts):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    ranks, found = facts["ranks"], facts["found"]
    first, batches = ranks[0], [rank["batches"] for rank in ranks]
    idle = [number for number, parts in enumerate(batches) if not parts]
    yield "each rank trains", not idle, (
        f"rank {idle[0] if idle else 0} has ended without a training step: is main() called, to its end?")
    yield f"the {RANKS} ranks have met before they train", all(rank["world"] == RANKS for rank in ranks), (
        "each rank believes that it is alone, and trains alone: all have to call dist.init_process_group first")

    hint = ("the loader of each rank goes through all images: a DistributedSampler deals them out, in place of "
            "shuffle=True")
    if "sampler" in found:
        hint = f"the sampler deals {found['sampler']}: without num_replicas= and rank= it asks the process group"
    yield "each rank trains on images of its own", not found.keys() & {"same data", "overlap", "sampler"}, hint

    yield global_batch(batches, REFERENCE)

    yield ("the ranks' gradients are averaged, and their parameters stay equal", not found.keys() & APART,
           why_apart(found, first))

    yield order(batches, found, REFERENCE)
    yield training(ranks, REFERENCE)
    yield from checkpoint(ranks, facts["contents"])
    yield from lines(ranks, REFERENCE)


def why_apart(found, rank):
    if found.keys() & {"own gradients", "part"} and not rank["wrapped"]:
        return "each rank steps by its own gradients: nothing averages them; DistributedDataParallel(model) does"
    if "own gradients" in found:
        return ("the model is wrapped, and each rank steps by its own gradients all the same: DDP averages in "
                "backward() only what went forward through the wrapper")
    if "sum" in found or "twice" in found:
        return f"the gradients are {'summed' if 'sum' in found else 'divided twice'}: DDP alone makes them the mean"
    key = next((key for key in ("weights", "apart", *found) if key in found), "apart")
    return f"{agree_verdicts.FINDINGS[key][0]} ({found.get(key)})"
