"""What the grade of exercise 8 looks at."""

import tempfile
from pathlib import Path

import sklearn.datasets  # noqa: F401  once, before the ranks are forked
import torch
from grade import load
from scripts import replay, run_script, same, torchruns_variables
from torch.nn.functional import cross_entropy

RANKS = 2
REFERENCE = load(Path(__file__).with_name("solution.py"), "reference")  # for its data and its model


def watch(file):
    """Per rank its collectives and batches, and what best.pt says."""
    places, store = torchruns_variables(RANKS)
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_script(file, places, [folder] * RANKS)
        path = Path(folder, "best.pt")
        best = torch.load(path, weights_only=True) if path.is_file() else None
    del store
    return {"ranks": ranks, "best": best}


def points(facts):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    ranks, best = facts["ranks"], facts["best"]
    calls = [[name for name, *_ in rank["calls"]] for rank in ranks]
    place = next((number for number, names in enumerate(zip(*calls)) if len(set(names)) > 1), min(map(len, calls)))
    names = [found[place] if place < len(found) else "none" for found in calls]
    yield "it ends, and all ranks have made the same calls in the same order", calls[0] == calls[1], (
        f"it ends by luck: call {place + 1} of the script is {names[0]} on rank 0 and {names[1]} on rank 1. "
        "One rank still decides otherwise than the other: by which value?")

    train, valid = REFERENCE.load_data()
    batches = [rank["batches"] for rank in ranks]
    steps = len(train) // REFERENCE.BATCH
    complete = all(len(parts) == REFERENCE.EPOCHS * steps for parts in batches)
    yield f"all {REFERENCE.EPOCHS} epochs are trained", complete, (
        f"{' and '.join(str(len(parts)) for parts in batches)} steps, and there were {REFERENCE.EPOCHS * steps}: the "
        "training was not what was wrong")

    epochs = replay(REFERENCE, ranks[0]["start"], batches, REFERENCE.RATE)
    yield "the gradients are averaged in all of them", all(same(rank["end"], epochs[-1]) for rank in ranks), (
        "the parameters are not those of one rank with the same batches: the training was not what was wrong")

    model = REFERENCE.build_model()
    losses, accuracies = zip(*(judged(model, parameters, *valid.tensors) for parameters in epochs))
    yield from kept(best, epochs, losses, accuracies, model, valid)


def judged(model, parameters, images, labels):
    """Loss and accuracy of a model with these parameters."""
    model.load_state_dict(parameters)
    with torch.no_grad():
        logits = model(images)
    return cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()


def kept(best, epochs, losses, accuracies, model, valid):
    """Whether best.pt is what it has to be."""
    yield "best.pt is saved", isinstance(best, dict) and best.keys() == {"epoch", "loss", "accuracy", "model"}, (
        "it does not lie there with epoch, loss, accuracy and model")
    epoch, loss = best["epoch"], float(best["loss"])
    shares = [[judged(model, parameters, *valid[rank::RANKS]) for parameters in epochs] for rank in range(RANKS)]
    hint = f"it says {loss:.4f} of epoch {epoch}, whose loss over all of them is {losses[epoch]:.4f}"
    own = [rank for rank in range(RANKS) if near(loss, shares[rank][epoch][0])]
    if own:
        hint += f": that is rank {own[0]}'s, over its own half, and nobody has asked what the other half says"
    elif near(loss, RANKS * losses[epoch]):
        hint += f": that is {RANKS} times as much, a sum of the ranks' means"
    yield "its loss is that over all validation images", near(loss, losses[epoch]), hint

    wanted = losses.index(min(losses))
    yield f"its epoch, counted from 0, is that with the lowest loss, {wanted}", epoch == wanted, (
        f"it is {epoch}, with {losses[epoch]:.4f}; {wanted} has {losses[wanted]:.4f}: what is saved when?")
    yield "its network is of that epoch", same(best["model"], epochs[epoch]), "the parameters are of another epoch"
    accuracy = float(best["accuracy"])
    hint = f"it says {accuracy:.4f}, and all {len(valid)} images have {accuracies[epoch]:.4f}"
    own = [rank for rank in range(RANKS) if near(accuracy, shares[rank][epoch][1])]
    if own:
        hint += f": that is rank {own[0]}'s, over its own half. The call that hung was there for a reason"
    yield "its accuracy is that of all validation images", near(accuracy, accuracies[epoch]), hint


def near(one, other):
    return abs(one - other) < 1e-8
