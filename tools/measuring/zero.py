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
    records = records[records["ranks"] == records["ranks"].max()].reset_index()
    first = records.loc[0]
    memory = pandas.DataFrame(list(records["memory"]))
    frame = memory[list(ROLES)].rename(columns={"optimizer state": "optimizer"})
    frame["model state"] = frame.sum(axis=1)
    frame["formula"] = records["formula"]
    frame["sent"] = [sum(row["bytes"] for row in rows) for rows in records["sent"]]
    frame = (frame / first["parameters"]).map("{:.3f}".format)
    tokens = GLOBAL_BATCH // first["ranks"] * SHAPE["context"]
    frame["activations"] = (memory["activations"] / tokens).map("{:,.0f}".format)
    frame.insert(0, "file", records["script"].map(lambda path: Path(path).name))
    frame.insert(1, "stage", records["stage"])
    return (f"{first['parameters']:,} parameters, {first['precision']}, rank 0 of "
            f"{first['ranks']}; bytes per parameter; formula: of the model state; sent: in a "
            f"step;\nactivations: bytes per token\n\n{frame.to_string(index=False)}")


def count(program: str, ranks: int, *flags: object) -> dict:
    """Return cluster.footprint's record of a program."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        run_job([sys.executable, "-m", "cluster.footprint", "--ranks", ranks, "--tensors", "real",
                 "--results", results, ROOT / program, *flags])
        record, = read_records(results)
    return record


def measure(script: str, stage: int, ranks: int, precision: str) -> dict:
    """Return what a run keeps, sends and computes, and ZeRO's formula for it."""
    sys.path.insert(0, str(ROOT / "05_zero"))
    from zero_formula import formula, parameter_count
    is_fsdp = script == "05_zero/fsdp.py"
    flags = [flag for name, value in SHAPE.items() for flag in (f"--{name}", value)]
    flags += ["--global-batch-size", GLOBAL_BATCH, "--precision", precision, "--device", "cpu"]
    footprint = count(script, ranks, *flags, *([] if is_fsdp else ["--stage", stage]))
    sizes = {}
    if precision == "fp32" or is_fsdp:  # fp32 shards are their own master copy
        sizes = {"element_bytes": 4, "master": 4 * (stage > 0 and not is_fsdp)}
    parameters = parameter_count(**SHAPE)
    return {"parameters": parameters,
            **{name: footprint[name] for name in ("memory", "sent", "flops")},
            "formula": sum(formula(stage, ranks, parameters, **sizes).values()),
            **describe_machine()}


if __name__ == "__main__":
    plan = [{"script": script, "ranks": ranks, "stage": stage, "precision": precision}
            for precision, all_ranks in PRECISIONS for script, stage in STAGES
            for ranks in all_ranks]
    run_study(RECORDS / "zero.jsonl", plan, measure)
