"""Compare the images/s of pairs of programs, A and B, run alternately on this CPU.

    python -m tools.measuring.bench [--sections N...]

Records: results/bench-SECTIONS.jsonl. After an interruption the same command resumes.
"""

from concurrent.futures import ThreadPoolExecutor

import pandas

from cluster.launch import ROOT, install_problem, rank_command
from cluster.records import describe_machine
from cluster.study import run_for_records, run_study
from workshop.flags import Parser

REPEATS = 3  # of each pair: A B A B A B
COMMON = "--device cpu --epochs 100"
CASES = {  # {name: flags}; the first 5 steps warm up
    "digits, cnn": "--dataset digits --model cnn --batch-size 64 --max-steps 155",
    "synthetic, cnn": "--dataset synthetic --model cnn --batch-size 64 --max-steps 105",
    "digits, resnet18": "--dataset digits --model resnet18 --batch-size 64 --max-steps 35"}
SECTIONS = {  # {number: (title, A, B)}; A and B: (program, ranks, copies run at once)
    1: ("Chapter 1 compared with a bare loop on one batch in memory",
        ("01_single_node/main.py", 1, 1), ("tools.measuring.bare_loop", 1, 1)),
    2: ("What synchronisation costs; B: two copies at once, their images/s added up",
        ("03_ddp/main.py", 2, 1), ("01_single_node/main.py", 1, 2)),
    5: ("Horovod compared with DDP, 2 ranks of one thread",
        ("02_horovod/main.py", 2, 1), ("03_ddp/main.py", 2, 1)),
    8: ("DeepSpeed's engine compared with DDP, 2 ranks of one thread",
        ("04_deepspeed/main.py", 2, 1), ("03_ddp/main.py", 2, 1))}


def measure(section, case, repeat, side):
    """Return the record of program A or B (the side); images/s is the sum over its copies."""
    _, a, b = SECTIONS[section]
    program, ranks, copies = a if side == "A" else b
    arguments = rank_command(program, ranks, *CASES[case].split(), *COMMON.split())
    with ThreadPoolExecutor(copies) as pool:
        runs = [record for records in pool.map(run_for_records, [arguments] * copies)
                for record in records]
    total = sum(record["images_per_second"] for record in runs)
    return {"runs": runs, "images_per_second": total}


def median_and_range(values, format_spec):
    """Return "median (least..most)" of a pandas Series."""
    return (f"{values.median():{format_spec}} "
            f"({values.min():{format_spec}}..{values.max():{format_spec}})")


def table(section, records):
    """Return a section as text: title, commands, and for each case the images/s and A / B."""
    title, *programs = SECTIONS[section]
    lines = [f"{section}. {title}, {REPEATS} pairs, alternating: median (least..most)"]
    for side, (program, ranks, _) in zip("AB", programs):
        lines.append(f"{side}: {program} on {ranks} ranks, {COMMON} FLAGS")
    lines += [f"FLAGS of {case}: {flags}" for case, flags in CASES.items()]
    rows = []
    for case, runs in records[records["section"] == section].groupby("case", sort=False):
        pairs = runs.pivot(index="repeat", columns="side", values="images_per_second")
        rows.append({"case": case, "A images/s": median_and_range(pairs["A"], ",.0f"),
                     "B images/s": median_and_range(pairs["B"], ",.0f"),
                     "A / B": median_and_range(pairs["A"] / pairs["B"], ".3f")})
    return "\n".join([*lines, pandas.DataFrame(rows).to_string(index=False)])


def main():
    parser = Parser(__doc__)
    parser.add_argument("--sections", nargs="+", type=int, choices=SECTIONS, default=[*SECTIONS])
    sections = [section for section in parser.parse_args().sections
                if not install_problem(SECTIONS[section][1][0])]
    results = ROOT / "results" / f"bench-{'-'.join(map(str, sections))}.jsonl"
    results.parent.mkdir(exist_ok=True)
    plan = [{"section": section, "case": case, "repeat": repeat, "side": side}
            for section in sections for case in CASES
            for repeat in range(REPEATS) for side in "AB"]
    records = pandas.DataFrame(run_study(results, plan, measure))
    host = describe_machine()
    print(f"{host['processor']}: {host['cpus']} cores, torch {host['torch']}, {host['git']}, "
          f"{host['time']}; OMP_NUM_THREADS=1")
    print(*(table(section, records) for section in sections), sep="\n\n")


if __name__ == "__main__":
    main()
