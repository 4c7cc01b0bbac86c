"""Checks for exercise 8: a deadlock."""

import torch
from scripts import by_torchrun, load_data, model_with, replay, same_tensors
from torch.nn.functional import cross_entropy

RANKS, RATE = 2, 0.2


def checks(file):
    """Yield (description, passed, hint) for each check, in the order of the work."""
    ranks = by_torchrun(file, RANKS)
    calls = [rank["calls"] for rank in ranks]
    yield "all ranks make the same collective calls in the same order, and finish", (
        calls[0] == calls[1]), (
        f"it finishes only by luck: rank 0 makes {len(calls[0])} collective calls, rank 1 makes "
        f"{len(calls[1])}. The ranks still branch on different values: which value differs?")
    epochs = replay(ranks[0]["start"], [rank["batches"] for rank in ranks], RATE)
    yield "it trains as before", all(same_tensors(rank["end"], epochs[-1]) for rank in ranks), (
        "the parameters are not those of one rank with the same batches: do not change the "
        "training; the bug is elsewhere")

    best = ranks[0]["saved"][0] if ranks[0]["saved"] else {}
    yield "best.pt is saved", best.keys() == {"epoch", "loss", "accuracy", "model"}, (
        "rank 0 must save a dict of epoch (counted from 0), loss, accuracy and model")
    _, valid = load_data()
    whole = [evaluate(parameters, *valid[:]) for parameters in epochs]
    losses = [loss for loss, _ in whole]
    epoch, loss, accuracy = best["epoch"], float(best["loss"]), float(best["accuracy"])
    halves = [evaluate(epochs[epoch], *valid[rank::RANKS]) for rank in range(RANKS)]
    yield "the saved loss is the mean over all validation images", near(loss, losses[epoch]), (
        f"it is {loss:.4f} for epoch {epoch}; the mean over all of them is {losses[epoch]:.4f}, "
        f"and over each rank's own half {halves[0][0]:.4f} and {halves[1][0]:.4f}")
    lowest = losses.index(min(losses))
    yield f"the saved epoch is that with the lowest loss, {lowest}, counted from 0", (
        epoch == lowest and same_tensors(best["model"], epochs[epoch])), (
        f"it is {epoch}, with loss {losses[epoch]:.4f}; epoch {lowest} has {losses[lowest]:.4f}: "
        "which network is saved when?")
    yield "the saved accuracy is over all validation images", near(accuracy, whole[epoch][1]), (
        f"it is {accuracy:.4f}; over all {len(valid)} images it is {whole[epoch][1]:.4f}, "
        f"over the ranks' own halves {halves[0][1]:.4f} and {halves[1][1]:.4f}. The call that hung "
        "was there for a reason")


def evaluate(parameters, images, labels):
    """Return loss and accuracy of the model with these parameters."""
    with torch.no_grad():
        logits = model_with(parameters)(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return cross_entropy(logits, labels).item(), accuracy


def near(value, expected):
    return abs(value - expected) < 1e-8
