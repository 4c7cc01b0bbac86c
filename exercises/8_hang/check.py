"""What the grade of exercise 8 looks at."""

from itertools import zip_longest

import solution  # for its data and its model
import torch
from scripts import by_torchrun, read, replay, same_parameters
from torch.nn.functional import cross_entropy

RANKS = 2


def points(file):
    """(what, whether it is right, the hint if not), in the order in which a learner gets there."""
    ranks = by_torchrun(file, RANKS)
    pairs = enumerate(zip_longest(*(rank["calls"] for rank in ranks)), 1)
    differing = [f"call {number} is {one} on rank 0, and {other} on rank 1" for number, (one, other) in pairs
                 if one != other]
    yield "it ends, and all ranks have made the same calls in the same order", not differing, (
        f"it ends by luck: {''.join(differing[:1])}. One rank still decides otherwise than the other: by which value?")

    train, valid = solution.load_data()
    batches = [rank["batches"] for rank in ranks]
    steps = len(train) // solution.BATCH * solution.EPOCHS
    counts = [len(of_rank) for of_rank in batches]
    yield f"all {solution.EPOCHS} epochs are trained", counts == [steps] * RANKS, (
        f"{counts} steps, and there were {steps}: the training was not what was wrong")
    epochs = replay(solution, ranks[0]["start"], batches)
    yield "the gradients are averaged in all of them", all(
        same_parameters(rank["end"], epochs[-1]) for rank in ranks), (
        "the parameters are not those of one rank with the same batches: the training was not what was wrong")

    best = read(ranks[0]["saved"][-1]) if ranks[0]["saved"] else None
    yield "best.pt is saved", isinstance(best, dict) and (
        best.keys() == {"epoch", "loss", "accuracy", "model"} and best["epoch"] in range(solution.EPOCHS)), (
        "rank 0 has saved no dict of epoch (counted from 0), loss, accuracy and model")
    of_all, *of_ranks = ([judged(parameters, *images) for parameters in epochs]
                         for images in (valid[:], *(valid[rank::RANKS] for rank in range(RANKS))))
    epoch, loss, accuracy = best["epoch"], float(best["loss"]), float(best["accuracy"])
    losses = [of_epoch[0] for of_epoch in of_all]
    yield "its loss is that over all validation images", near(loss, losses[epoch]), (
        f"it says {loss:.4f} of epoch {epoch}, whose loss over all of them is {losses[epoch]:.4f}, a mean; rank by "
        f"rank, each over its own half, it is {of_ranks[0][epoch][0]:.4f} and {of_ranks[1][epoch][0]:.4f}")
    wanted = losses.index(min(losses))
    yield f"its epoch, counted from 0, is that with the lowest loss, {wanted}", epoch == wanted, (
        f"it is {epoch}, with {losses[epoch]:.4f}; {wanted} has {losses[wanted]:.4f}: what is saved when?")
    yield "its network is of that epoch", same_parameters(best["model"], epochs[epoch]), (
        "the parameters are of another epoch")
    yield "its accuracy is that of all validation images", near(accuracy, of_all[epoch][1]), (
        f"it says {accuracy:.4f}, and all {len(valid)} images have {of_all[epoch][1]:.4f}; the ranks' own halves have "
        f"{of_ranks[0][epoch][1]:.4f} and {of_ranks[1][epoch][1]:.4f}. The call that hung was there for a reason")


def judged(parameters, images, labels):
    """Loss and accuracy of the model with these parameters."""
    model = solution.build_model()
    model.load_state_dict(parameters)
    with torch.no_grad():
        logits = model(images)
    return cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()


def near(one, other):
    return abs(one - other) < 1e-8
