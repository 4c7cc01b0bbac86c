"""Show what Adam makes of rounding: fsdp.py on 1 and 2 ranks, as on several CPUs. Records: rounding.jsonl.

    python -m tools.measuring.rounding

Under some settings of cpus.py the same perceptron is trained for an epoch on one rank and on two, with one global
batch, in fp32 and in fp64. In exact arithmetic both end with the same parameters.
"""

import os
import tempfile
from pathlib import Path

import pandas
from launch import launch
from records import RECORDS
from runs import study

from tools.measuring.cpus import SETTINGS
from tools.measuring.parameters import parameters

FLAGS = ("--dataset", "digits", "--global-batch-size", 64, "--epochs", 1, "--width", 256, "--layers", 8)
NAMES, SEEDS = ("as it is", "AVX2", "SSE4.1"), (0, 1, 2)
STEP = 0.002 * 64 / 256  # the learning rate for a global batch of 64, and the size of Adam's first step


def compare(setting, seed, precision):
    """The record of two ranks, with what differs from that of one."""
    os.environ.update(SETTINGS[setting])
    found, vectors = [], []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in 1, 2:
            flags = "--seed", seed, "--precision", precision, "--checkpoint", Path(folder, f"{ranks}")
            found.append(launch("05_zero/fsdp.py", ranks, *FLAGS, *flags))
            vectors.append(parameters(Path(folder, f"{ranks}")))
    for name in SETTINGS[setting]:
        del os.environ[name]
    difference = abs(vectors[0] - vectors[1])
    return found[1] | {"setting": setting, "largest": float(difference.max()),
                       "moved": int((difference > STEP / 10).sum()),
                       "losses": [record["loss"] for record in found],
                       "accuracies": [record["test_accuracy"] for record in found]}


def table(records):
    """A row a setting and seed: the largest difference in fp64; in fp32 also how many moved, and loss and test."""
    rows = []
    for (setting, seed), pair in records.groupby(["setting", "seed"], sort=False):
        found = {row["precision"]: row for row in pair.to_dict("records")}
        fp32 = found["fp32"]
        rows.append({"setting": setting, "seed": seed, "fp64": f"{found['fp64']['largest']:.1e}",
                     "fp32": f"{fp32['largest']:.1e}", "moved": fp32["moved"],
                     "loss, 1 and 2 ranks": "{:.5f} {:.5f}".format(*fp32["losses"]),
                     "test accuracy": "{:.4f} {:.4f}".format(*fp32["accuracies"])})
    first = records.iloc[0]
    return (f"{first['processor']}; 1 and 2 ranks, {first['parameters']:,} parameters, an epoch of Adam\n"
            "fp64, fp32: the largest difference of any parameter between 1 and 2 ranks, in this precision\n"
            f"moved: parameters that differ by more than a tenth of a step of {STEP:g}, in fp32, as what follows\n\n"
            + pandas.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    print(table(pandas.DataFrame(study(RECORDS / "rounding.jsonl", [
        {"setting": setting, "seed": seed, "precision": precision}
        for setting in NAMES for seed in SEEDS for precision in ("fp32", "fp64")], compare))))
