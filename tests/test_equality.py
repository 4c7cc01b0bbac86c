"""Data parallelism is the same training: 1, 2, 3 and 4 ranks reach the same parameters.

All have the same global batch, and are compared with chapter 1 on one rank, which the first test
compares with a plain loop.
"""

import json
import re

import pytest
import torch
from conftest import case, copy_and_edit, run, train
from sklearn.datasets import load_digits
from tolerances import TIES, assert_close, assert_equal_in_fp64, distance

from tools.measuring.parameters import parameters

EPOCHS = 5
SINGLE, HVD, DDP, DEEPSPEED = "01_single_node", "02_horovod", "03_ddp", "04_deepspeed"
IN_FP64 = "--precision", "fp64"
SMOOTH = ["smooth.py"]
numbers, slow = pytest.mark.numbers, pytest.mark.slow


@numbers
def test_chapter_1_trains_as_a_plain_pytorch_loop(tmp_path):
    """Each image once per epoch, in a new order each epoch; --lr is per 256 images and warms up."""
    batch, epochs = 80, 2
    result = run(SINGLE, 1, "--batch-size", batch, "--lr", 0.3, "--warmup-epochs", 1,
                 "--epochs", epochs, *IN_FP64, "--checkpoint", tmp_path / "c")
    assert result.code == 0, result.err

    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    train_mask = torch.arange(len(images)) % 5 != 0
    images, labels = images[train_mask].reshape(-1, 1, 8, 8), labels[train_mask]
    images = (images - images[:256].mean()) / images[:256].std(correction=0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(256, 128), torch.nn.ReLU(),
        torch.nn.Linear(128, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0, momentum=0.9)
    step, steps = 0, len(images) // batch
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for indices in order[:steps * batch].split(batch):
            step += 1
            optimizer.param_groups[0]["lr"] = 0.3 * batch / 256 * min(1, step / steps)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[indices]), labels[indices]).backward()
            optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
    assert_equal_in_fp64(parameters(tmp_path / "c"), expected)


@pytest.mark.parametrize(("chapter", "ranks"), [
    case(DDP, 1), case(DDP, 2, marks=[numbers]), case(DDP, 3, marks=[numbers]),
    case(DDP, 4, marks=[slow]), case(HVD, 2, marks=[numbers]), case(HVD, 4, marks=[slow])])
def test_ranks_agree_in_fp64(chapter, ranks, one_rank_parameters, tmp_path):
    weights = train(chapter, ranks, tmp_path / "c", *IN_FP64, "--epochs", EPOCHS)
    baseline = one_rank_parameters(SINGLE, *IN_FP64, "--epochs", EPOCHS)
    assert_equal_in_fp64(weights, baseline)


@pytest.mark.parametrize("ranks", [
    pytest.param(2, marks=numbers), pytest.param(4, marks=slow)])
def test_deepspeed_ranks_agree_up_to_rounding(ranks, smooth_baseline, tmp_path):
    """In fp32, because DeepSpeed has no fp64."""
    baseline = smooth_baseline()
    weights = train(DEEPSPEED, ranks, tmp_path / "c", "--epochs", 1, hook=SMOOTH)
    assert_close("parameters, fp32", distance(weights, baseline.parameters), baseline.bound)


@numbers
def test_gradient_accumulation_steps_as_one_large_batch(smooth_baseline, tmp_path):
    """2 ranks with 3 micro-batches of 8 images take the same steps as one rank with 48 images."""
    main = copy_and_edit(DEEPSPEED, tmp_path / "copy")
    config = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.0}
    main.with_name("ds_config.json").write_text(json.dumps(config))
    weights = train(main, 2, tmp_path / "c", "--epochs", 1, "--results", tmp_path / "r",
                    hook=SMOOTH)
    record, baseline = json.loads((tmp_path / "r").read_text()), smooth_baseline()
    assert (record["batch_size"], record["steps"]) == (8, 1437 // 48)
    assert_close("parameters, fp32", distance(weights, baseline.parameters), baseline.bound)


@numbers
@pytest.mark.parametrize("chapter", [case(DDP), case(HVD)])
def test_frameworks_broadcast_the_initial_parameters(chapter, one_rank_parameters, tmp_path):
    seed_per_rank = ("seed(args.seed)", "seed(args.seed + rank)")
    main = copy_and_edit(chapter, tmp_path / "copy", seed_per_rank)
    weights = train(main, 2, tmp_path / "c", *IN_FP64, "--epochs", 1)
    baseline = one_rank_parameters(SINGLE, *IN_FP64, "--epochs", 1)
    assert_equal_in_fp64(weights, baseline)


@pytest.mark.core
@pytest.mark.parametrize("chapter", [case(SINGLE), case(HVD), case(DDP)])
def test_resume_equals_an_uninterrupted_run(chapter, one_rank_parameters, tmp_path):
    """Stopped in the second epoch; resumed from the start of that epoch, on more ranks."""
    ranks_before, ranks_after = (1, 1) if chapter == SINGLE else (2, 3)
    train(chapter, ranks_before, tmp_path / "c", *IN_FP64, "--max-steps", 40)
    weights = train(chapter, ranks_after, tmp_path / "c", *IN_FP64, "--epochs", EPOCHS, "--resume",
                    "--results", tmp_path / "r")
    assert json.loads((tmp_path / "r").read_text())["steps"] == 4 * (1437 // 48)
    baseline = one_rank_parameters(SINGLE, *IN_FP64, "--epochs", EPOCHS)
    assert_equal_in_fp64(weights, baseline)


@pytest.mark.core
def test_deepspeed_resumes_on_another_number_of_ranks(smooth_baseline, tmp_path):
    train(DEEPSPEED, 2, tmp_path / "c", "--epochs", 1, hook=SMOOTH)
    weights = train(DEEPSPEED, 3, tmp_path / "c", "--epochs", 2, "--resume", hook=SMOOTH)
    baseline = smooth_baseline(2)
    assert_close("parameters, fp32", distance(weights, baseline.parameters), baseline.bound)


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
