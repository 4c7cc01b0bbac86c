"""Count the training steps to 95 % test accuracy, per pair of batch size and learning rate.

    OMP_NUM_THREADS=1 python steps_to_target.py ../assets/records/steps_to_target.jsonl

The program trains the cnn on the digits like main.py, but tests after every 64 images, or, if the
batch is larger, after every step. As in Shallue et al. (1811.03600), each batch size is tried with
a grid of rates, and every rate is reported. Nothing is timed, so other programs may run. Pairs that
the file already contains are skipped.
"""

import json
import math
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch
from main import batches, build_model
from torch.nn.functional import cross_entropy

from workshop import data

TARGET, SEEDS = 0.95, range(5)
BATCHES = [8, 16, 32, 64, 128, 256, 512]
RATES = [0.00625 * 2**power for power in range(8)]  # up to 0.8
LARGEST_RATE = 0.05 / 8  # per image of the batch; in a trial, larger rates were never best
STEPS, EPOCHS = 100, 10  # limit of a run: these steps plus these epochs
IMAGES = 1437  # training images


def train_and_test(batch: int, rate: float, seed: int):
    """Train like main.py; yield (steps done, last loss, test accuracy) at each test."""
    torch.manual_seed(seed)
    train, test = data.load_data(SimpleNamespace(dataset="digits"), batch)
    mean, std = train.images[:256].mean(), train.images[:256].std()  # 256 are enough
    test_images, test_labels = map(torch.from_numpy, test[range(len(test))])
    test_images = (test_images.float() - mean) / std
    model = build_model("cnn", train.images.shape[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    sampler = torch.utils.data.RandomSampler(train, generator=torch.Generator())
    steps_per_test, step = max(1, 64 // batch), 0
    for epoch in count():
        sampler.generator.manual_seed(seed + epoch)
        for images, labels in batches(train, sampler, batch, torch.device("cpu"), drop_last=True):
            optimizer.zero_grad()
            loss = cross_entropy(model((images.float() - mean) / std), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % steps_per_test == 0:
                with torch.no_grad():
                    correct = model(test_images).argmax(1) == test_labels
                yield step, loss.item(), correct.double().mean().item()


def steps_to_target(batch: int, rate: float, seed: int, limit: int) -> int | None:
    """Return the first step at the target; None if the loss diverges or the limit comes first."""
    for step, loss, accuracy in train_and_test(batch, rate, seed):
        if accuracy >= TARGET:
            return step
        if step >= limit or not math.isfinite(loss):
            return None


def main():
    if len(sys.argv) != 2:
        sys.exit("steps_to_target.py: give one argument, the file for the records")
    path = Path(sys.argv[1])
    lines = path.read_text().splitlines() if path.exists() else []
    finished_pairs = {(record["batch"], record["rate"]) for record in map(json.loads, lines)}
    for batch in BATCHES:
        limit = STEPS + EPOCHS * IMAGES // batch
        for rate in RATES:
            if rate > batch * LARGEST_RATE or (batch, rate) in finished_pairs:
                continue
            steps = [steps_to_target(batch, rate, seed, limit) for seed in SEEDS]
            record = {"dataset": "digits", "model": "cnn", "precision": "fp32", "target": TARGET,
                      "batch": batch, "rate": rate, "momentum": 0.9, "seeds": list(SEEDS),
                      "steps": steps, "limit": limit, "torch": torch.__version__}
            with open(path, "a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"batch {batch}, rate {rate:g}: {steps} steps", flush=True)


if __name__ == "__main__":
    main()
