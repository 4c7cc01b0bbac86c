"""Count the steps to 95 % test accuracy, for each batch size and learning rate. Records: steps_to_target.jsonl.

    python -m tools.measuring.steps_to_target

The cnn is trained on the digits as main.py of chapter 1 does it, but for the test: after every step where the batch has
64 images or more, else after as many steps as take 64 images. As Shallue et al. (1811.03600) do, each batch size tries
a grid of rates, and every rate is reported. Nothing is timed: other work on the machine does not disturb it.
"""

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is imported

from launch import ROOT, machine
from records import RECORDS
from runs import study

sys.path.insert(0, str(ROOT / "01_single_node"))
TARGET, SEEDS = 0.95, range(5)
BATCHES = [8, 16, 32, 64, 128, 256, 512]
RATES = [0.00625 * 2**power for power in range(8)]  # up to 0.8; of SGD with momentum 0.9, as in main.py
MOST_AN_IMAGE = 0.05 / 8  # of the rates that a batch tries: more than any that was the best in a trial
EVERY = 64  # images
STEPS, EPOCHS = 100, 10  # a run ends after so many steps and then so many epochs


def training(batch: int, rate: float, seed: int) -> Iterator[tuple[int, float, float]]:
    """Train on and on: (steps done, loss of the last one, test accuracy) at each test. Like main.py, epoch by epoch."""
    import workshop

    import main as chapter
    import torch
    from torch.nn.functional import cross_entropy
    torch.manual_seed(seed)
    train, test = workshop.load_tensors(SimpleNamespace(dataset="digits", batch_size=batch, global_batch_size=batch))
    std, mean = torch.std_mean(train.tensors[0][:256].float())
    test_images, test_labels = (test.tensors[0].float() - mean) / std, test.tensors[1]
    model = chapter.build_model("cnn", train.tensors[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    sampler = torch.utils.data.RandomSampler(train, generator=torch.Generator())
    every, step, epoch = max(1, EVERY // batch), 0, 0
    while True:
        sampler.generator.manual_seed(seed + epoch)
        for images, labels in chapter.batches(train, sampler, batch, torch.device("cpu"), drop_last=True):
            optimizer.zero_grad()
            loss = cross_entropy(model((images.float() - mean) / std), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % every == 0:
                with torch.no_grad():
                    right = (model(test_images).argmax(1) == test_labels).double()
                yield step, loss.item(), right.mean().item()
        epoch += 1


def limit(batch: int) -> int:
    """The steps after which a run ends without the target."""
    return STEPS + EPOCHS * 1437 // batch


def steps_to_target(batch: int, rate: float, seed: int) -> int | None:
    """The first test at or above the target; None where the limit or a loss that is not finite comes before."""
    for step, loss, accuracy in training(batch, rate, seed):
        if accuracy >= TARGET:
            return step
        if step >= limit(batch) or not loss < float("inf"):
            return None


def measure(batch, rate):
    """The record: steps to the target of each seed, or None."""
    steps = [steps_to_target(batch, rate, seed) for seed in SEEDS]
    return {"dataset": "digits", "model": "cnn", "precision": "fp32", "target": TARGET, "batch": batch, "rate": rate,
            "momentum": 0.9, "seeds": list(SEEDS), "steps": steps, "limit": limit(batch)} | machine()


if __name__ == "__main__":
    study(RECORDS / "steps_to_target.jsonl", [{"batch": batch, "rate": rate} for batch in BATCHES for rate in RATES
                                              if rate <= batch * MOST_AN_IMAGE], measure)
