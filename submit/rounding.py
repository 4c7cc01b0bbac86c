"""Show what Adam makes of rounding: chapter 5 on 1 and 2 ranks, as on several CPUs; records: assets/rounding.jsonl.

    python submit/rounding.py

Under each setting of cpus.py main.py (fp32) and fsdp.py (fp32 and fp64) train the same perceptron for an epoch on one
rank and on two, with one global batch. In exact arithmetic both end with the same parameters.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import pandas
from cpus import SETTINGS
from demo import FLAGS, PERCEPTRON, parameters
from launch import ROOT, launch
from records import refusal
from tqdm import tqdm

RUNS = [("05_zero", "fp32"), ("05_zero/fsdp.py", "fp32"), ("05_zero/fsdp.py", "fp64")]
STEP = 0.002 * 64 / 256  # --lr for a global batch of 64: about what Adam changes a parameter by in a step
RECORDS = ROOT / "assets" / "rounding.jsonl"


def compare(setting, chapter, precision):
    """The record of two ranks, with what differs from that of one."""
    os.environ.update(SETTINGS[setting])
    found, vectors = [], []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in 1, 2:
            flags = "--stage", 3, "--precision", precision, "--checkpoint", Path(folder, f"{ranks}")
            found.append(launch(chapter, ranks, *FLAGS, *PERCEPTRON, *flags))
            vectors.append(parameters(Path(folder, f"{ranks}")))
    for name in SETTINGS[setting]:
        del os.environ[name]
    difference = abs(vectors[0] - vectors[1])
    return found[1] | {"setting": setting, "largest": difference.max(),
                       "over_a_tenth_of_a_step": int((difference > STEP / 10).sum()),
                       "right": [round(360 * record["test_accuracy"]) for record in found],
                       "losses": [record["loss"] for record in found]}


def table(records):
    """A row a setting and program: the largest difference of a parameter, how many moved, loss and test of both."""
    rows = [{"setting": found["setting"],
             "program": f"{'fsdp.py' if 'fsdp' in found['chapter'] else 'main.py'}, {found['precision']}",
             "largest": f"{found['largest']:.1e}", "parameters": found["over_a_tenth_of_a_step"],
             "loss on 1 and 2": "{:.6f} {:.6f}".format(*found["losses"]),
             "right of 360": "{} {}".format(*found["right"])} for found in records.to_dict("records")]
    first = records.iloc[0]
    return (f"{first['processor']}, 1 and 2 ranks, {first['parameters']:,} parameters; largest: difference of any "
            f"parameter;\nparameters: how many differ by more than a tenth of Adam's step of {STEP:g}\n\n"
            + pandas.DataFrame(rows).to_string(index=False))


def main():
    if reason := refusal(RECORDS):
        sys.exit(f"rounding.py: {reason}")
    records = [compare(setting, *run) for setting in tqdm(SETTINGS, unit="setting", disable=None) for run in RUNS]
    RECORDS.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(table(pandas.DataFrame(records)))


if __name__ == "__main__":
    main()
