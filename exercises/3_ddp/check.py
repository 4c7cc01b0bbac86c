"""Checks for exercise 3: a one-GPU script with DistributedDataParallel."""

import torch
from digits import load_data
from scripts import BATCH, load_model, replay, run_with_torchrun, same_tensors

IMAGES, EPOCHS, LR = 1437, 2, 0.1


def checks(file):
    first, second = results = run_with_torchrun(file, 2)
    yield from check_data(results)
    size = len(run_with_torchrun(file, 1)[0]["batches"][0])
    yield f"on one rank, too, a step takes {BATCH} images", size == BATCH, (
        f"it takes {size}: the number of ranks is not always 2")
    yield "the ranks' parameters stay equal", same_tensors(first["end"], second["end"]), (
        "each rank uses its own gradients for at least some parameters: "
        "DistributedDataParallel(model) averages them in backward(), but only for a forward pass "
        "through the wrapper")
    steps = IMAGES // BATCH
    first_epoch, last_epoch = first["batches"][:steps], first["batches"][-steps:]
    same_order = torch.equal(torch.cat(first_epoch), torch.cat(last_epoch))
    yield "the order changes every epoch", not same_order, (
        "each epoch has the same order: the sampler shuffles by its seed and the epoch's number; "
        "call sampler.set_epoch(epoch)")
    end = replay(results, LR)[-1]
    yield "the result is that of one rank with the same batches, up to rounding", (
        same_tensors(first["end"], end)), (
        "the result differs from a one-rank run: keep epochs, optimizer, learning rate and "
        "momentum unchanged: the global batch is the same, so the learning rate is, too")
    yield from check_output(results, end)


def check_data(results):
    rank_images = IMAGES // len(results)  # in an epoch
    image_sets = []
    for result in results:
        images = torch.cat(result["batches"])[:rank_images]
        image_sets.append({image.numpy().tobytes() for image in images})
    common_images = set.intersection(*image_sets)
    yield "each rank trains on different images", len(common_images) < 0.05 * rank_images, (
        "each rank's loader goes through all images, or its sampler has the wrong number of ranks: "
        "create a DistributedSampler after the process group, and drop shuffle=True")
    sizes = [len(result["batches"][0]) for result in results]
    yield f"a step takes {BATCH} images over all ranks", sum(sizes) == BATCH, (
        f"it takes {' + '.join(map(str, sizes))} = {sum(sizes)}: divide the loader's batch "
        "size by the number of ranks")


def check_output(results, end):
    """Check the saved file and the printed lines. end: the parameters of a one-rank run."""
    saved = [(rank, file) for rank, result in enumerate(results) for file in result["saved"]]
    yield "only one rank saves the model", len(saved) == 1, (
        f"there are {len(saved)} files, from ranks {[rank for rank, _ in saved]}: ranks that write "
        "the same file at the same time may corrupt it")
    state_dict = saved[0][1]
    yield "the saved state_dict loads into the plain model and has its final parameters", (
        isinstance(state_dict, dict) and same_tensors(state_dict, end)), (
        "it is not the plain model's final state_dict; in the wrapper's, every name begins with "
        '"module."')
    counts = [len(result["lines"]) for result in results]
    yield "each line is printed once, by one rank", sum(counts) == max(counts) == EPOCHS + 1, (
        f"the ranks print {' and '.join(map(str, counts))} lines; expected: {EPOCHS + 1} from one "
        "rank")
    images, labels = load_data()[1].tensors
    correct = load_model(end)(images).argmax(1) == labels
    accuracy = f"{correct.double().mean().item():.4f}"
    last_line = next(result["lines"][-1] for result in results if result["lines"])
    yield "the printed accuracy is that of all test images", accuracy in last_line, (
        f"the accuracy over all {len(labels)} images is {accuracy}, but the last line printed is: "
        f"{last_line}")
