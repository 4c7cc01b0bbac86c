"""Checks for exercise 8: a deadlock."""

from math import isclose

import torch
from digits import load_data
from scripts import load_model, replay, run_with_torchrun, same_tensors
from torch.nn.functional import cross_entropy

LR = 0.2


def checks(file):
    first, second = results = run_with_torchrun(file, 2)
    yield "all ranks make the same collective calls in the same order, and finish", (
        first["calls"] == second["calls"]), (
        f"it finishes only by luck: rank 0 makes {len(first['calls'])} collective calls, rank 1 "
        f"makes {len(second['calls'])}. The ranks still branch on different values: which value "
        "differs?")
    epochs = replay(results, LR)
    yield "it trains as before", all(
        same_tensors(result["end"], epochs[-1]) for result in results), (
        "the parameters are not those of one rank with the same batches: do not change the "
        "training; the bug is elsewhere")

    checkpoint = first["saved"][0] if first["saved"] else {}
    yield "best.pt is saved", checkpoint.keys() == {"epoch", "loss", "accuracy", "model"}, (
        "rank 0 must save a dict of epoch (counted from 0), loss, accuracy and model")
    _, valid = load_data()
    metrics = [evaluate(parameters, *valid[:]) for parameters in epochs]
    losses = [loss for loss, _ in metrics]
    epoch, best_epoch = checkpoint["epoch"], losses.index(min(losses))
    loss, accuracy = metrics[epoch]
    saved_loss, saved_accuracy = float(checkpoint["loss"]), float(checkpoint["accuracy"])
    yield "the saved loss is the mean over all validation images", isclose(saved_loss, loss), (
        f"it is {saved_loss:.4f} for epoch {epoch}; the mean over all of them is {loss:.4f}. "
        "Each rank has only half of them")
    yield f"the saved epoch is that with the lowest loss, {best_epoch}, counted from 0", (
        epoch == best_epoch and same_tensors(checkpoint["model"], epochs[epoch])), (
        f"it is {epoch}, with loss {loss:.4f}; epoch {best_epoch} has {min(losses):.4f}: "
        "which network is saved when?")
    yield "the saved accuracy is over all validation images", isclose(saved_accuracy, accuracy), (
        f"it is {saved_accuracy:.4f}; over all {len(valid)} images it is {accuracy:.4f}. Keep "
        "the call at which it hung: it gathers both ranks' halves")


def evaluate(parameters, images, labels):
    """Return loss and accuracy of the model with these parameters."""
    with torch.no_grad():
        logits = load_model(parameters)(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return cross_entropy(logits, labels).item(), accuracy
