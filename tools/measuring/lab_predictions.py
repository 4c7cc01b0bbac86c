"""Predict runs of the lab from one rank's record, then run them.

    python -m tools.measuring.lab_predictions      # records: assets/records/lab_predictions.jsonl

The lab's nodes share this machine's cores, so the one-rank baseline is measured while independent
copies load the other cores, as the ranks of the real run do.
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


def one_rank(model, nodes):
    """Return a one-rank record, with the median step time of `nodes` copies run at once."""
    with ThreadPoolExecutor(nodes) as pool:
        runs = [pool.submit(start, "03_ddp", 1, *flags_of(model)) for _ in range(nodes)]
        records = [future.result() for future in runs]
    return records[0] | {"step_seconds": median(record["step_seconds"] for record in records)}


def predict(folder, nodes, *network):
    """Return the samples/s that submit/predict.py predicts for one GPU (here: rank) per node."""
    table = folder / "table.csv"
    run(["python", ROOT / "submit" / "predict.py", folder / "run.jsonl", "--nodes", nodes,
         "--gpus", 1, "--samples", 1, *network, "--csv", table])
    return float(pandas.read_csv(table)["samples/s"].iloc[0])


def measure(nodes, model, link):
    """Return a run's records: predicted from the link's nominal rate, and from the doctor."""
    os.environ["LAB"] = f"predictions-{os.getpid()}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = one_rank(model, nodes)
        pandas.Series(alone).to_json(folder / "run.jsonl")
        run([*LAB, "up", nodes, "--rate", link])
        try:
            in_lab = [*LAB, "run", "-n", nodes, "python"]
            run([*in_lab, ROOT / "submit" / "doctor.py", "--results", folder / "doctor.jsonl"])
            networks = {"the link's rate": ["--node-link", LINKS[link]],
                        "the doctor's all-reduces": ["--measured", folder / "doctor.jsonl"]}
            predictions = {network: predict(folder, nodes, *flags)
                           for network, flags in networks.items()}  # before the run
            run([*in_lab, ROOT / "03_ddp" / "main.py", *flags_of(model), "--results",
                 folder / "together.jsonl"])
        finally:
            run([*LAB, "down"])
        together = read(folder / "together.jsonl")[-1]
    return [{"network": network, "predicted": value, "alone": alone["images_per_second"],
             "images_per_second": together["images_per_second"],
             "step_seconds": together["step_seconds"], "alone_step_seconds": alone["step_seconds"],
             "gradient_bytes": together["gradient_bytes"], **machine()}
            for network, value in predictions.items()]


if __name__ == "__main__":
    study(RECORDS / "lab_predictions.jsonl",
          [{"nodes": nodes, "model": model, "link": link}
           for model in STEPS for nodes in (2, 4) for link in LINKS], measure,
          lambda record: print(f"{record['model']}, {record['nodes']} nodes, {record['link']}, by "
                               f"{record['network']}: predicted {record['predicted']:,.0f}, ran at "
                               f"{record['images_per_second']:,.0f} images/s"))
