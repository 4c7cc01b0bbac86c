"""Data parallelism is the same training: any number of ranks reaches a plain loop's parameters."""

import functools
import json
import re

import pytest
import torch
from conftest import case, copy_and_edit, numbers, run, run_for_record
from sklearn.datasets import load_digits
from tolerances import ROUNDING_FACTOR, TIES, assert_close, assert_equal_in_fp64, distance
from torch import nn

from tools.measuring.parameters import parameters

SINGLE, HVD, DDP, DEEPSPEED = "01_single_node", "02_horovod", "03_ddp", "04_deepspeed"
BATCH, EPOCHS = 48, 5  # the global batch is divisible by 1, 2, 3 and 4
STEPS = 1437 // BATCH  # in an epoch; some images are left over
FLAGS = "--global-batch-size", BATCH, "--lr", 0.3, "--warmup-epochs", 1
IN_FP64 = "--precision", "fp64"


@functools.cache
def plain_loop(epochs, dtype=torch.float64, is_smooth=False, is_reversed=False):
    """Return the parameters after a loop without ranks, in which --lr is per 256 images.

    Each epoch has each image once, in a new order. is_smooth: as smooth.py. is_reversed: the images
    of a batch are in reverse order, so that sums round differently.
    """
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    train_mask = torch.arange(len(images)) % 5 != 0
    images, labels = images[train_mask].reshape(-1, 1, 8, 8), labels[train_mask]
    images = ((images - images[:256].mean()) / images[:256].std(correction=0)).to(dtype)
    activation, pool = (nn.SiLU, nn.AvgPool2d) if is_smooth else (nn.ReLU, nn.MaxPool2d)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), activation(), nn.Conv2d(32, 64, 3), activation(), pool(2),
        nn.Flatten(), nn.Linear(256, 128), activation(), nn.Linear(128, 10)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0, momentum=0.9)
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for step, indices in enumerate(order[:STEPS * BATCH].split(BATCH), 1):
            indices = indices.flip(0) if is_reversed else indices
            optimizer.param_groups[0]["lr"] = 0.3 * BATCH / 256 * min(1, epoch + step / STEPS)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[indices]), labels[indices]).backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def train(chapter, ranks, folder, *flags, **options):
    """Train on these ranks. Return the record; the checkpoint is folder/c."""
    return run_for_record(chapter, ranks, *FLAGS, *flags, "--checkpoint", folder / "c",
                          folder=folder, **options)


@numbers
@pytest.mark.parametrize(("chapter", "ranks"), [case(SINGLE, 1), case(DDP, 2), case(HVD, 2)])
def test_chapters_train_as_a_plain_loop(chapter, ranks, tmp_path):
    """Each rank draws other first parameters, so that the frameworks have to broadcast rank 0's."""
    main = chapter
    if ranks > 1:
        seed_per_rank = ("seed(args.seed)", "seed(args.seed + rank)")
        main = copy_and_edit(chapter, tmp_path / "copy", seed_per_rank)
    train(main, ranks, tmp_path, *IN_FP64, "--epochs", EPOCHS)
    assert_equal_in_fp64(parameters(tmp_path / "c"), plain_loop(EPOCHS))


@pytest.mark.core
@numbers
@pytest.mark.parametrize(("chapter", "all_ranks"), [
    case(SINGLE, [1, 1]), case(HVD, [2, 3, 4]), case(DDP, [2, 3, 4, 1])])
def test_resuming_on_other_ranks_equals_an_uninterrupted_run(chapter, all_ranks, tmp_path):
    """Each start but the last stops within an epoch; the next resumes from the epoch's start."""
    for epoch, ranks in enumerate(all_ranks, 1):
        is_last = epoch == len(all_ranks)
        stop = ["--epochs", EPOCHS] if is_last else ["--max-steps", epoch * STEPS + 11]
        record = train(chapter, ranks, tmp_path, *IN_FP64, *stop, *["--resume"] * (epoch > 1))
    assert record["steps"] == (EPOCHS - len(all_ranks) + 1) * STEPS
    assert_equal_in_fp64(parameters(tmp_path / "c"), plain_loop(EPOCHS))


@pytest.mark.core
@numbers
def test_deepspeed_accumulates_and_resumes_as_a_plain_loop(tmp_path):
    """2 ranks with 3 micro-batches of 8 images, then 3 ranks; fp32, because it has no fp64."""
    main = copy_and_edit(DEEPSPEED, tmp_path / "copy")
    config = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.0}
    main.with_name("ds_config.json").write_text(json.dumps(config))
    record = train(main, 2, tmp_path, "--epochs", 1, hook=["smooth.py"])
    assert (record["batch_size"], record["steps"]) == (8, STEPS)
    train(DEEPSPEED, 3, tmp_path, "--epochs", 2, "--resume", hook=["smooth.py"])
    expected = plain_loop(2, torch.float32, is_smooth=True)
    rounding = distance(expected, plain_loop(2, torch.float32, is_smooth=True, is_reversed=True))
    assert_close("parameters, fp32", distance(parameters(tmp_path / "c"), expected),
                 ROUNDING_FACTOR * rounding)


@pytest.mark.parametrize("chapter", [case(HVD), case(DDP)])
def test_resnet_is_evaluated_with_rank_0_statistics(chapter, tmp_path):
    """BatchNorm's running statistics differ by rank; evaluation uses those that rank 0 saves."""
    flags = ("--model", "resnet18", "--epochs", 1, "--global-batch-size", 240,
             "--checkpoint", tmp_path / "c")
    correct_images = []
    for ranks, resume in (2, []), (1, ["--resume"]):
        result = run(chapter, ranks, *flags, *resume)
        assert result.code == 0, result.err
        correct_images.append(int(re.search(r"\((\d+) of 360", result.out)[1]))
    assert abs(correct_images[0] - correct_images[1]) <= TIES
