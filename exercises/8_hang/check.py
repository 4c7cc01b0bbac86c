"""What the grade of exercise 8 looks at."""

from itertools import zip_longest

import torch
from scripts import BATCH, build_model, by_torchrun, load_data, replay, same_tensors
from torch.nn.functional import cross_entropy

RANKS, EPOCHS, RATE = 2, 7, 0.2


def points(file):
    """Yield (what, whether it is right, the hint if not), in the learner's order."""
    ranks = by_torchrun(file, RANKS)
    pairs = enumerate(zip_longest(*(rank["calls"] for rank in ranks)), 1)
    differing = [f"call {number} is {first} on rank 0, and {second} on rank 1"
                 for number, (first, second) in pairs if first != second]
    yield "it ends, and all ranks have made the same calls in the same order", not differing, (
        f"it ends by luck: {''.join(differing[:1])}. One rank still decides otherwise than the "
        "other: by which value?")

    train, valid = load_data()
    batches = [rank["batches"] for rank in ranks]
    steps = len(train) // BATCH * EPOCHS
    counts = [len(of_rank) for of_rank in batches]
    yield f"all {EPOCHS} epochs are trained", counts == [steps] * RANKS, (
        f"{counts} steps, and there were {steps}: the training was not what was wrong")
    epochs = replay(ranks[0]["start"], batches, RATE)
    yield "the gradients are averaged in all of them", all(
        same_tensors(rank["end"], epochs[-1]) for rank in ranks), (
        "the parameters are not those of one rank with the same batches: the training was not "
        "what was wrong")

    best = ranks[0]["saved"][0] if ranks[0]["saved"] else None
    complete = isinstance(best, dict) and best.keys() == {"epoch", "loss", "accuracy", "model"}
    yield "best.pt is saved", complete and best["epoch"] in range(EPOCHS), (
        "rank 0 has saved no dict of epoch (counted from 0), loss, accuracy and model")
    whole = [evaluate(parameters, *valid[:]) for parameters in epochs]
    epoch, loss, accuracy = best["epoch"], float(best["loss"]), float(best["accuracy"])
    halves = [evaluate(epochs[epoch], *valid[rank::RANKS]) for rank in range(RANKS)]
    losses = [loss for loss, _ in whole]
    yield "its loss is that over all validation images", near(loss, losses[epoch]), (
        f"it says {loss:.4f} of epoch {epoch}, whose loss over all of them is {losses[epoch]:.4f}, "
        f"a mean; rank by rank, each over its own half, it is {halves[0][0]:.4f} and "
        f"{halves[1][0]:.4f}")
    lowest = losses.index(min(losses))
    yield f"its epoch, counted from 0, is that with the lowest loss, {lowest}", epoch == lowest, (
        f"it is {epoch}, with {losses[epoch]:.4f}; {lowest} has {losses[lowest]:.4f}: what is "
        "saved when?")
    yield "its network is of that epoch", same_tensors(best["model"], epochs[epoch]), (
        "the parameters are of another epoch")
    yield "its accuracy is that of all validation images", near(accuracy, whole[epoch][1]), (
        f"it says {accuracy:.4f}, and all {len(valid)} images have {whole[epoch][1]:.4f}; the "
        f"ranks' own halves have {halves[0][1]:.4f} and {halves[1][1]:.4f}. The call that hung "
        "was there for a reason")


def evaluate(parameters, images, labels):
    """Return loss and accuracy of the model with these parameters."""
    model = build_model()
    model.load_state_dict(parameters)
    with torch.no_grad():
        logits = model(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return cross_entropy(logits, labels).item(), accuracy


def near(value, expected):
    return abs(value - expected) < 1e-8
