"""Count what a rank of chapter 5 keeps and sends, at every stage, as one of 1, 2 and 4 ranks.

Records: assets/records/zero.jsonl.
"""

import sys
import tempfile
from pathlib import Path

import pandas

from cluster.launch import ROOT, run_job
from cluster.records import RECORDS, describe_machine, read_records
from cluster.study import run_study

ROLES = ("parameters", "gradients", "master copy", "optimizer state")
STAGES = [("05_zero/main.py", 0), ("05_zero/main.py", 1), ("05_zero/main.py", 2),
          ("05_zero/main.py", 3), ("05_zero/fsdp.py", 3)]
PRECISIONS = [("bf16", (1, 2, 4)), ("fp32", (2,))]  # and the numbers of ranks
SHAPE = {"layers": 6, "width": 128, "context": 64}
GLOBAL_BATCH = 64  # sequences


def table(records: pandas.DataFrame) -> str:
    """Return a table, as text, of the runs with most ranks.

    Bytes per parameter by role, together, by ZeRO's formula, and sent in a step; activations in
    bytes per token of the rank's batch.
    """
    rows, ranks = [], records["ranks"].max()
    records = records[records["ranks"] == ranks]
    for record in records.to_dict("records"):
        count, memory = record["parameters"], record["memory"]
        model_state = [memory[role] for role in ROLES]
        sent = sum(row["bytes"] for row in record["sent"])
        sizes = [*model_state, sum(model_state), record["formula"], sent]
        tokens = GLOBAL_BATCH // ranks * SHAPE["context"]
        rows.append([Path(record["script"]).name, record["stage"],
                     *(f"{size / count:.3f}" for size in sizes),
                     f"{memory['activations'] / tokens:,.0f}"])
    names = ["", "", "", "", "", "", "model", "model state,", "sent in", "activations"]
    columns = ["file", "stage", "parameters", "gradients", "master copy", "optimizer", "state",
               "formula", "a step", "per token"]
    frame = pandas.DataFrame(rows, columns=pandas.MultiIndex.from_arrays([names, columns]))
    first = records.iloc[0]
    return (f"{first['parameters']:,} parameters, {first['precision']}, rank 0 of {ranks}; bytes "
            "per parameter; activations: bytes per token\n\n" + frame.to_string(index=False))


def measure(script: str, stage: int, ranks: int, precision: str) -> dict:
    """Return what cluster.footprint says of a run, and ZeRO's formula for it."""
    sys.path.insert(0, str(ROOT / "05_zero"))
    from zero_formula import formula, parameter_count
    flags = [flag for name, value in SHAPE.items() for flag in (f"--{name}", value)]
    flags += ["--global-batch-size", GLOBAL_BATCH, "--precision", precision, "--device", "cpu"]
    if script == "05_zero/main.py":
        flags += ["--stage", stage]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        run_job([sys.executable, "-m", "cluster.footprint", "--ranks", ranks, "--tensors", "real",
                 "--results", results, ROOT / script, *flags])
        footprint, = read_records(results)
    sizes = {}
    if precision == "fp32" or script == "05_zero/fsdp.py":  # fp32 shards are their own master copy
        sizes = {"element_bytes": 4, "master": 4 * (0 < stage and script != "05_zero/fsdp.py")}
    parameters = parameter_count(**SHAPE)
    return {"parameters": parameters, "memory": footprint["memory"], "sent": footprint["sent"],
            "flops": footprint["flops"],
            "formula": sum(formula(stage, ranks, parameters, **sizes).values()),
            **describe_machine()}


if __name__ == "__main__":
    plan = [{"script": script, "ranks": ranks, "stage": stage, "precision": precision}
            for precision, all_ranks in PRECISIONS for script, stage in STAGES
            for ranks in all_ranks]
    run_study(RECORDS / "zero.jsonl", plan, measure)
