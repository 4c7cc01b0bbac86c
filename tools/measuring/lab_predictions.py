"""Predict runs of the lab from one rank's record, then run them.

    python -m tools.measuring.lab_predictions      # records: assets/records/lab_predictions.jsonl

The lab's nodes share this machine's cores. So the one-rank baseline is measured while copies of it
load the other cores, as the other ranks do in the lab.
"""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import pandas

from submit.study import RECORDS, ROOT, machine, read, run, start, study

LAB = ("bash", ROOT / "submit" / "lab.sh")
LINKS = {"1gbit": 125e6, "100mbit": 12.5e6}  # bytes/s
STEPS = {"cnn": 35, "resnet18": 12}


def flags_of(model):
    return ("--dataset", "synthetic", "--model", model, "--max-steps", STEPS[model], "--epochs", 1,
            "--device", "cpu", "--lr", 0.001)


def measure_one_rank(model, nodes):
    """Return a one-rank record with the median step time of `nodes` copies that run at once."""
    with ThreadPoolExecutor(nodes) as pool:
        runs = [pool.submit(start, "03_ddp", 1, *flags_of(model)) for _ in range(nodes)]
        records = [future.result() for future in runs]
    return records[0] | {"step_seconds": median(record["step_seconds"] for record in records)}


def predict(folder, nodes, *network_flags):
    """Return the samples/s that submit/predict.py predicts for one rank per node."""
    table = folder / "table.csv"
    run(["python", ROOT / "submit" / "predict.py", folder / "run.jsonl", "--nodes", nodes,
         "--gpus", 1, "--samples", 1, *network_flags, "--csv", table])
    return float(pandas.read_csv(table)["samples/s"].iloc[0])


def measure(nodes, model, link):
    """Return two records: predicted from the link's rate, and from the doctor's all-reduces."""
    os.environ["LAB"] = f"predictions-{os.getpid()}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one_rank = measure_one_rank(model, nodes)
        pandas.Series(one_rank).to_json(folder / "run.jsonl")
        run([*LAB, "up", nodes, "--rate", link])
        try:
            lab_python = [*LAB, "run", "-n", nodes, "python"]
            run([*lab_python, ROOT / "submit" / "doctor.py", "--results", folder / "doctor.jsonl"])
            networks = {"the link's rate": ["--node-link", LINKS[link]],
                        "the doctor's all-reduces": ["--measured", folder / "doctor.jsonl"]}
            predictions = {network: predict(folder, nodes, *flags)
                           for network, flags in networks.items()}  # made before the run
            run([*lab_python, ROOT / "03_ddp" / "main.py", *flags_of(model), "--results",
                 folder / "lab.jsonl"])
        finally:
            run([*LAB, "down"])
        lab_run = read(folder / "lab.jsonl")[-1]
    return [{"network": network, "predicted": value, "alone": one_rank["images_per_second"],
             "images_per_second": lab_run["images_per_second"],
             "step_seconds": lab_run["step_seconds"],
             "alone_step_seconds": one_rank["step_seconds"],
             "gradient_bytes": lab_run["gradient_bytes"], **machine()}
            for network, value in predictions.items()]


def show(record):
    print(f"{record['model']}, {record['nodes']} nodes, {record['link']}, by {record['network']}: "
          f"predicted {record['predicted']:,.0f}, measured {record['images_per_second']:,.0f} "
          "images/s")


if __name__ == "__main__":
    plan = [{"nodes": nodes, "model": model, "link": link}
            for model in STEPS for nodes in (2, 4) for link in LINKS]
    study(RECORDS / "lab_predictions.jsonl", plan, measure, show)
