"""What the grade of exercise 8 looks at."""

import torch
from scripts import by_torchrun, load_data, model_with, replay, same_tensors
from torch.nn.functional import cross_entropy

RANKS, RATE = 2, 0.2


def points(file):
    """Yield (what, whether it is right, the hint if not), in the learner's order."""
    ranks = by_torchrun(file, RANKS)
    calls = [rank["calls"] for rank in ranks]
    yield "it ends, and all ranks have made the same calls in the same order", (
        calls[0] == calls[1]), (
        f"it ends by luck: rank 0 makes {len(calls[0])} calls, rank 1 {len(calls[1])}. One rank "
        "still decides otherwise than the other: by which value?")
    epochs = replay(ranks[0]["start"], [rank["batches"] for rank in ranks], RATE)
    yield "it trains as before", all(same_tensors(rank["end"], epochs[-1]) for rank in ranks), (
        "the parameters are not those of one rank with the same batches: the training was not "
        "what was wrong")

    best = ranks[0]["saved"][0] if ranks[0]["saved"] else {}
    yield "best.pt is saved", best.keys() == {"epoch", "loss", "accuracy", "model"}, (
        "rank 0 has saved no dict of epoch (counted from 0), loss, accuracy and model")
    _, valid = load_data()
    whole = [evaluate(parameters, *valid[:]) for parameters in epochs]
    losses = [loss for loss, _ in whole]
    epoch, loss, accuracy = best["epoch"], float(best["loss"]), float(best["accuracy"])
    halves = [evaluate(epochs[epoch], *valid[rank::RANKS]) for rank in range(RANKS)]
    yield "its loss is that over all validation images", near(loss, losses[epoch]), (
        f"it says {loss:.4f} of epoch {epoch}, whose loss over all of them is {losses[epoch]:.4f}, "
        f"a mean; rank by rank, each over its own half, it is {halves[0][0]:.4f} and "
        f"{halves[1][0]:.4f}")
    lowest = losses.index(min(losses))
    yield f"it is of the epoch with the lowest loss, {lowest}, counted from 0", (
        epoch == lowest and same_tensors(best["model"], epochs[epoch])), (
        f"it says {epoch}, with {losses[epoch]:.4f}; {lowest} has {losses[lowest]:.4f}: which "
        "network is saved when?")
    yield "its accuracy is that of all validation images", near(accuracy, whole[epoch][1]), (
        f"it says {accuracy:.4f}, and all {len(valid)} images have {whole[epoch][1]:.4f}; the "
        f"ranks' own halves have {halves[0][1]:.4f} and {halves[1][1]:.4f}. The call that hung "
        "was there for a reason")


def evaluate(parameters, images, labels):
    """Return loss and accuracy of the model with these parameters."""
    with torch.no_grad():
        logits = model_with(parameters)(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return cross_entropy(logits, labels).item(), accuracy


def near(value, expected):
    return abs(value - expected) < 1e-8
