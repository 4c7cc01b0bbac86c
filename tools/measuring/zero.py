"""Count the bytes on each rank of chapter 5, for every stage on 1, 2 and 4 ranks.

Records: assets/records/zero.jsonl.
"""

import pandas

from cluster.records import RECORDS
from cluster.study import run_chapter, run_study

ROLES = ("parameters", "gradients", "master copy", "optimizer state")
PEAKS = ("peak parameters", "peak gradients")
STAGES = [("05_zero", 0), ("05_zero", 1), ("05_zero", 2), ("05_zero", 3),
          ("05_zero/fsdp.py", 1), ("05_zero/fsdp.py", 3)]
FLAGS = ("--device", "cpu", "--layers", 8, "--width", 128, "--global-batch-size", 16,
         "--max-steps", 2)


def total(memory: dict[str, float]) -> float:
    """Return the bytes of all roles together."""
    return sum(memory[role] for role in ROLES)


def table(records: pandas.DataFrame) -> str:
    """Return a table, as text: bytes per parameter of the fullest rank, and by the formula."""
    rows = []
    for record in records.to_dict("records"):
        fullest = max(record["memory"], key=total)
        count = record["parameters"]
        rows.append({
            "file": "fsdp.py" if "fsdp.py" in record["chapter"] else "main.py",
            "stage": record["stage"], "N": record["ranks"],
            **{role: fullest[role] / count for role in ROLES},
            "sum": total(fullest) / count, "formula": total(record["memory_formula"]) / count,
            **{peak: fullest[peak] / count for peak in PEAKS}})
    first = records.iloc[0]
    return (f"{first['parameters']:,} parameters, {first['precision']}; CPU; bytes per parameter "
            "on the rank that holds most\n\n"
            + pandas.DataFrame(rows).to_string(index=False, float_format="{:.3f}".format))


def measure(chapter, ranks, stage, precision):
    return run_chapter(chapter, ranks, *FLAGS, "--stage", stage, "--precision", precision)


if __name__ == "__main__":
    plan = [{"chapter": chapter, "ranks": ranks, "stage": stage, "precision": precision}
            for precision in ("fp32", "bf16") for chapter, stage in STAGES for ranks in (1, 2, 4)]
    run_study(RECORDS / "zero.jsonl", plan, measure)
