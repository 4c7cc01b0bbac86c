"""Data parallelism is the same training: 1, 2, 3 and 4 ranks with one global batch reach the same parameters."""

import re

import pytest
from conftest import ROOT, lines, observe, parameters

GLOBAL_BATCH = "48"  # divides by 1, 2, 3 and 4, and does not divide the 1,437 images
EPOCHS = 5
ONE, DDP = ROOT / "01_single_node" / "main.py", ROOT / "03_ddp" / "main.py"


def train(main, ranks, folder, *flags):
    """Parameters after each epoch, as vectors."""
    done = observe(main, ranks, folder, "--global-batch-size", GLOBAL_BATCH, "--checkpoint", folder / "checkpoint",
                   *flags)
    assert done.code == 0, done.err
    epochs = len(list(folder.glob("parameters.*")))
    return [parameters(folder / f"parameters.{epoch}") for epoch in range(1, epochs + 1)]


def differences(ones, others):
    assert len(ones) == len(others) > 0
    return [(one - other).abs().max().item() for one, other in zip(ones, others)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Chapter 1's parameters after each epoch, by precision."""
    return {precision: train(ONE, 1, tmp_path_factory.mktemp("one") / precision, "--precision", precision,
                             "--epochs", EPOCHS) for precision in ("fp64", "fp32")}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_fp64_after_every_epoch(ranks, reference, tmp_path):
    found = train(DDP, ranks, tmp_path, "--precision", "fp64", "--epochs", EPOCHS)
    assert len(found) == EPOCHS
    assert max(differences(reference["fp64"], found)) <= 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_fp32_after_the_first_epoch(ranks, reference, tmp_path, record_property):
    found = differences(reference["fp32"], train(DDP, ranks, tmp_path, "--epochs", EPOCHS))
    record_property("difference by epoch", found)  # rounding grows from epoch to epoch: reported, not asserted
    print(f"{ranks} ranks, fp32, largest difference after each epoch:", *(f"{value:.1e}" for value in found))
    assert found[0] <= 1e-5


@pytest.mark.parametrize(("line", "changed", "same"), [
    ("logits = ddp(images)", "logits = model(images)", False),
    ("DistributedSampler(train,", "DistributedSampler(train, 2, 0,", False),
    ("torch.manual_seed(args.seed)", "torch.manual_seed(args.seed + rank)", True),
], ids=["gradients not_averaged", "all ranks get the same images", "ranks start from other parameters"])
def test_the_check_notices_what_makes_a_difference(line, changed, same, reference, tmp_path):
    """Broken copies of chapter 3 train apart; DDP mends parameters that differ at the start."""
    source = DDP.read_text()
    assert source.count(line) == 1
    (tmp_path / "main.py").write_text(source.replace(line, changed))
    found = train(tmp_path / "main.py", 2, tmp_path / "seen", "--precision", "fp64", "--epochs", 1)
    difference, = differences(reference["fp64"][:1], found)
    assert difference <= 1e-12 if same else difference > 1e-3


@pytest.mark.parametrize(("main", "ranks"), [(ONE, (1, 1)), (DDP, (2, 2)), (DDP, (2, 3))])
def test_resume_reaches_the_parameters_of_an_uninterrupted_run(main, ranks, reference, tmp_path):
    """Stopped after 40 steps, in the middle of the second epoch; resumed on the same or on another number of ranks."""
    flags = "--precision", "fp64"
    train(main, ranks[0], tmp_path, *flags, "--max-steps", "40")
    train(main, ranks[1], tmp_path, *flags, "--epochs", "3", "--resume")
    difference = (parameters(tmp_path / "checkpoint") - reference["fp64"][2]).abs().max().item()
    assert difference <= (0 if main == ONE else 1e-12)
    rates = lines(tmp_path / "rates.0")
    assert len(rates) == 3 * (1437 // 48)  # no step is done twice and none is left out


def test_evaluation_counts_each_image_once_for_every_number_of_ranks(tmp_path):
    """360 test images; 7 ranks and batches of 64 divide nothing evenly. Training ends after one step of fp64."""
    seen = {}
    for ranks in 1, 2, 3, 7:
        folder = tmp_path / str(ranks)
        done = observe(DDP, ranks, folder, "--global-batch-size", 84, "--max-steps", 1, "--precision", "fp64")
        assert done.code == 0, done.err
        tests = [lines(folder / f"batches.{rank}")[-1] for rank in range(ranks)]
        assert sorted(index for batches in tests for batch in batches for index in batch) == list(range(360))
        seen[ranks] = re.search(r"test accuracy .*", done.out)[0]
    assert len(set(seen.values())) == 1, seen


def test_a_resnet_is_evaluated_with_one_rank_s_statistics(tmp_path):
    """BatchNorm's running statistics differ by rank: all evaluate with those that rank 0 saves."""
    flags = "--model", "resnet18", "--max-steps", "6", "--batch-size", "16"
    done = observe(DDP, 2, tmp_path, *flags, "--checkpoint", tmp_path / "checkpoint")
    assert done.code == 0, done.err
    on_one = observe(DDP, 1, tmp_path / "one", "--model", "resnet18", "--max-steps", "6", "--batch-size", "32",
                     "--checkpoint", tmp_path / "checkpoint", "--resume")
    assert on_one.code == 0, on_one.err
    assert re.search("test accuracy.*", done.out)[0] == re.search("test accuracy.*", on_one.out)[0]
