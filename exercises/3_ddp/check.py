"""What the grade of exercise 3 looks at."""

from scripts import by_torchrun, points_of_data, points_of_training


def points(file):
    """Yield (what, whether it is right, the hint if not), in the learner's order."""
    ranks = by_torchrun(file, 2)
    yield from points_of_data(ranks)
    yield from points_of_training(
        ranks, 0.1, 2, "each rank steps by its own gradients, at least in part: "
        "DistributedDataParallel(model) averages them in backward(), and only those of what went "
        "forward through the wrapper",
        "are epochs, optimizer, learning rate and momentum what they were? The "
        "global batch is the same, and with it the learning rate")
