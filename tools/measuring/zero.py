"""Count the bytes on each rank of chapter 5, for every stage on 1, 2 and 4 ranks; fp32: on 2.

Records: assets/records/zero.jsonl.
"""

import pandas

from cluster.records import RECORDS
from cluster.study import run_chapter, run_study

ROLES = ("parameters", "gradients", "master copy", "optimizer state")
STAGES = [("05_zero", 0), ("05_zero", 1), ("05_zero", 2), ("05_zero", 3),
          ("05_zero/fsdp.py", 1), ("05_zero/fsdp.py", 3)]
PRECISIONS = [("bf16", (1, 2, 4)), ("fp32", (2,))]  # and the numbers of ranks
FLAGS = ("--device", "cpu", "--layers", 6, "--width", 128, "--global-batch-size", 64,
         "--max-steps", 2)


def total(memory: dict[str, float]) -> float:
    """Return the bytes of all roles together."""
    return sum(memory[role] for role in ROLES)


def table(records: pandas.DataFrame) -> str:
    """Return a table, as text, of the rank that holds most, from the runs with most ranks.

    Bytes per parameter with gradients at their peak, and by the formula of ZeRO's paper, in which
    stage 1 keeps all gradients; activations in bytes per token of the rank's batch.
    """
    rows, ranks = [], records["ranks"].max()
    records = records[records["ranks"] == ranks]
    for record in records.to_dict("records"):
        fullest = max(record["memory"], key=total)
        count, tokens = record["parameters"], record["batch_size"] * record["context"]
        expected = record["memory_formula"]
        if record["stage"] == 1:
            expected = expected | {"gradients": expected["parameters"]}
        peak = fullest | {"gradients": fullest["peak gradients"]}
        sizes = [*(peak[role] for role in ROLES), total(peak), total(expected),
                 fullest["peak parameters"]]
        rows.append(["fsdp.py" if "fsdp.py" in record["chapter"] else "main.py",
                     record["stage"], *(f"{size / count:.3f}" for size in sizes),
                     f"{fullest['activations'] / tokens:,.0f}"])
    names = ["", "", "", "peak of", "", "", "peak of", "", "peak of", "activations"]
    columns = ["file", "stage", "parameters", "gradients", "master copy", "optimizer", "step",
               "formula", "parameters", "per token"]
    frame = pandas.DataFrame(rows, columns=pandas.MultiIndex.from_arrays([names, columns]))
    first = records.iloc[0]
    return (f"{first['parameters']:,} parameters, {first['precision']}, CPU, {ranks} ranks; on the "
            "rank that holds most: bytes per parameter; activations: bytes per token\n\n"
            + frame.to_string(index=False))


def measure(chapter, ranks, stage, precision):
    return run_chapter(chapter, ranks, *FLAGS, "--stage", stage, "--precision", precision)


if __name__ == "__main__":
    plan = [{"chapter": chapter, "ranks": ranks, "stage": stage, "precision": precision}
            for precision, all_ranks in PRECISIONS for chapter, stage in STAGES
            for ranks in all_ranks]
    run_study(RECORDS / "zero.jsonl", plan, measure)
