"""Checks for exercise 3: a one-GPU script with DistributedDataParallel."""

from scripts import BATCH, check_data, check_training, run_with_torchrun


def checks(file):
    results = run_with_torchrun(file, 2)
    yield from check_data(results)
    size = len(run_with_torchrun(file, 1)[0]["batches"][0])
    yield f"on one rank, too, a step takes {BATCH} images", size == BATCH, (
        f"it takes {size}: the number of ranks is not always 2")
    yield from check_training(
        results, 0.1, 2, "each rank uses its own gradients for at least some parameters: "
        "DistributedDataParallel(model) averages them in backward(), but only for a forward pass "
        "through the wrapper",
        "keep epochs, optimizer, learning rate and momentum unchanged: the global batch is the "
        "same, so the learning rate is, too")
