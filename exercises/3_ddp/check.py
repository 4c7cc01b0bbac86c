"""Checks for exercise 3: a one-GPU script with DistributedDataParallel."""

from scripts import by_torchrun, check_data, check_training


def checks(file):
    """Yield (description, passed, hint) for each check, in the order of the work."""
    ranks = by_torchrun(file, 2)
    yield from check_data(ranks)
    yield from check_training(
        ranks, 0.1, 2, "each rank uses its own gradients for at least some parameters: "
        "DistributedDataParallel(model) averages them in backward(), but only for a forward pass "
        "through the wrapper",
        "keep epochs, optimizer, learning rate and momentum unchanged: the global batch is the "
        "same, so the learning rate is, too")
