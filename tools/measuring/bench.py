"""Compare programs by images/s on this CPU, two in turn: what loading, ranks and libraries cost.

    python -m tools.measuring.bench [--sections N...]

The records go to results/bench-SECTIONS.jsonl; a killed bench resumes.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

import pandas

from submit.study import ROOT, command, machine, missing, records_of, study

REPEATS = 3  # of each comparison: A B A B ...
CASES = {  # the first 5 steps warm up
    "digits, cnn": "--dataset digits --model cnn --batch-size 64 --max-steps 155",
    "synthetic, cnn": "--dataset synthetic --model cnn --batch-size 64 --max-steps 105",
    "digits, resnet18": "--dataset digits --model resnet18 --batch-size 64 --max-steps 35"}
STAGE_3 = {"digits, perceptron": "--stage 3 --dataset digits --batch-size 64 --max-steps 20"}
BARE = "-m tools.measuring.bare_loop"  # of python
TWICE = "twice at the same time, the two speeds added"
SECTIONS = {  # title, A and B (each a program, its ranks, how many run at the same time), a remark
    1: ("Chapter 1 compared with a bare loop", ("01_single_node/main.py", 1, 1), (BARE, 1, 1),
        "the same model and optimizer on one batch kept in memory, without loading and metrics"),
    2: ("What synchronisation costs", ("03_ddp/main.py", 2, 1), ("01_single_node/main.py", 1, 2),
        TWICE),
    5: ("Horovod compared with DDP, 2 ranks of one thread", ("02_horovod/pytorch/main.py", 2, 1),
        ("03_ddp/main.py", 2, 1), ""),
    6: ("What synchronisation costs with Horovod and TensorFlow",
        ("02_horovod/tensorflow/main.py", 2, 1), ("01_single_node/main_tf.py", 1, 2), TWICE),
    8: ("DeepSpeed's engine compared with DDP, 2 ranks of one thread",
        ("04_deepspeed/main.py", 2, 1), ("03_ddp/main.py", 2, 1), ""),
    9: ("Stage 3 of DeepSpeed compared with FSDP2, 2 ranks of one thread",
        ("05_zero/main.py", 2, 1), ("05_zero/fsdp.py", 2, 1), "")}


def cases(section):
    """Return {name: flags} of each comparison of a section."""
    return STAGE_3 if section == 9 else CASES


def words_of(section, case, side):
    """Return the command of A or B, and how many of it run at the same time."""
    program, ranks, times = SECTIONS[section][1 + "AB".index(side)]
    flags = cases(section)[case].split()
    if program == BARE:
        return [sys.executable, *BARE.split(), *flags], times
    return [*command(program, ranks), *flags, "--device", "cpu", "--epochs", "100"], times


def measure(section, case, repeat, side):
    """Return the record of A or B, with images/s of all its programs together."""
    words, times = words_of(section, case, side)
    with ThreadPoolExecutor(times) as pool:
        runs = [record for records in pool.map(records_of, [words] * times) for record in records]
    speed = sum(record["images_per_second"] for record in runs)
    return {"runs": runs, "images_per_second": speed}


def median_and_range(values, form):
    return f"{values.median():{form}} ({values.min():{form}}..{values.max():{form}})"


def table(section, records):
    """Return a section's title and commands, and for each case images/s of A and B, and A / B."""
    title, *programs, remark = SECTIONS[section]
    lines = [f"{section}. {title}, {REPEATS} pairs in turn"]
    for side, (program, ranks, _) in zip("AB", programs):
        mpiexec = f"mpiexec -n {ranks} " if ranks > 1 else ""
        lines.append(f"{side}: {mpiexec}python {program} FLAGS")
    lines += [f"   {remark}"] if remark else []
    lines.append(f"{'case':26} {'A images/s':>24} {'B images/s':>24}   A / B")
    for case, rows in records[records["section"] == section].groupby("case", sort=False):
        pairs = rows.pivot(index="repeat", columns="side", values="images_per_second")
        speeds = [f"{median_and_range(pairs[side], ',.0f'):>24}" for side in "AB"]
        ratio = median_and_range(pairs["A"] / pairs["B"], ".3f")
        lines.append(f"{case:26} {speeds[0]} {speeds[1]}   {ratio}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", type=int, choices=SECTIONS, default=[*SECTIONS])
    sections = parser.parse_args().sections
    if missing("02_horovod") and {5, 6} & set(sections):
        print(f"sections 5 and 6 are left out: {missing('02_horovod')}", file=sys.stderr)
        sections = [section for section in sections if section not in (5, 6)]
    if not sections:
        return
    results = ROOT / "results" / f"bench-{'-'.join(map(str, sections))}.jsonl"
    results.parent.mkdir(exist_ok=True)
    plan = [{"section": section, "case": case, "repeat": repeat, "side": side}
            for section in sections for case in cases(section)
            for repeat in range(REPEATS) for side in "AB"]
    records = pandas.DataFrame(study(results, plan, measure))

    here = machine()
    print(f"CPU figures of {here['host']}: {here['cpus']} cores, torch {here['torch']}, "
          f"Python {here['python']}, {here['git']}, {here['time']}; OMP_NUM_THREADS=1\n"
          "FLAGS: --device cpu --epochs 100 and of each case:",
          *(f"  {case}: {flags}" for case, flags in (CASES | STAGE_3).items()), sep="\n")
    print("median (least..most)", *(table(section, records) for section in sections), sep="\n\n")


if __name__ == "__main__":
    main()
