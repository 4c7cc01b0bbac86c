"""Count what each rank of chapter 5 holds, for every stage on 1, 2 and 4 ranks. Records: assets/records/zero.jsonl."""

import pandas
from launch import launch
from records import RECORDS
from runs import study

ROLES = ("parameters", "gradients", "master copy", "optimizer state")
STAGES = [("05_zero", stage) for stage in range(4)] + [("05_zero/fsdp.py", stage) for stage in (1, 3)]
FLAGS = ("--device", "cpu", "--global-batch-size", 64, "--max-steps", 2)


def total(row: dict[str, float]) -> float:
    return sum(row[role] for role in ROLES)


def table(records):
    """Bytes a parameter, of the rank that has most, beside the formula's: a row for each stage and number of ranks."""
    rows = []
    for found in records.to_dict("records"):
        counted, expected = max(found["memory"], key=total), found["memory_formula"]
        each = {name: counted[name] / found["parameters"] for name in (*ROLES, "peak parameters", "peak gradients")}
        fsdp = "fsdp.py" in found["chapter"]
        rows.append({"file": "fsdp.py" if fsdp else "main.py", "stage": found["stage"], "N": found["ranks"],
                     **{name: each[name] for name in ROLES},
                     "sum": total(counted) / found["parameters"], "formula": total(expected) / found["parameters"],
                     "peak parameters": each["peak parameters"], "peak gradients": each["peak gradients"]})
    first = records.iloc[0]
    return (f"{first['parameters']:,} parameters, {first['precision']}; CPU; "
            "bytes a parameter on the rank that holds most\n\n"
            + pandas.DataFrame(rows).to_string(index=False, float_format="{:.3f}".format))


def count(chapter, ranks, stage, precision):
    return launch(chapter, ranks, *FLAGS, "--stage", stage, "--precision", precision)


if __name__ == "__main__":
    study(RECORDS / "zero.jsonl", [{"chapter": chapter, "ranks": ranks, "stage": stage, "precision": precision}
                                   for precision in ("fp32", "bf16") for chapter, stage in STAGES
                                   for ranks in (1, 2, 4)], count)
