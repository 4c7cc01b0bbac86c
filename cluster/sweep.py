"""Measure how a chapter scales: throughput by batch size, weak scaling, strong scaling.

    python -m cluster.sweep weak --chapters 03_ddp 04_deepspeed --results weak.jsonl -- --lr 0.1

batch: one rank, a run per batch size. weak: a fixed batch per rank, so the global batch grows with
the ranks. strong: a fixed global batch. Everything after -- is passed to each main.py. A run starts
the chapter's submit.slurm, as a shell script, with RANKS and the site's name in SITE: on this
machine, or within one allocation of PBS or Slurm (sweep.pbs, sweep.slurm).

Each run appends one line to --results when it ends. If you start the same sweep again, it does
only the runs that are missing or failed; use another file on another machine. Each repeat does all
runs once, so that a temporary slowdown affects all of them.
"""

import math
import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pandas
from tqdm import tqdm

from cluster.launch import ROOT, describe_failure, end_on_sigterm, install_problem
from cluster.records import read_records
from cluster.study import BUSY, find_records, run_for_records, run_unless_recorded
from workshop.flags import Parser

STEPS = "35"  # 5 to warm up, 30 timed
TIMEOUT = 1800  # seconds for a run
SCRIPT = "submit.slurm"  # under PBS, too: without its header it is a shell script for any site
TITLES = {"batch": "batch size; efficiency: compared with the best",
          "weak": "weak scaling, the batch per rank; efficiency: compared with the fewest ranks",
          "strong": "strong scaling, the global batch; efficiency: compared with the fewest ranks"}


def plan_runs(args):
    """Return the runs in order, as dicts of the names and values that identify them."""
    site, flags = os.environ.get("SITE", "here"), shlex.join(args.flags)
    runs = []
    for repeat in range(args.repeats):
        for study in args.studies:
            for chapter in args.chapters:
                if study == "batch":
                    cases = [(1, batch) for batch in args.batch_sizes]
                else:
                    cases = [(ranks, args.batch_size) for ranks in args.ranks
                             if ranks == 1 or not chapter.startswith("01")]  # has one rank only
                runs += [{"study": study, "chapter": chapter, "ranks": ranks, "batch": batch,
                          "flags": flags, "site": site, "repeat": repeat}
                         for ranks, batch in cases]
    return runs


def script_command(planned):
    """Return the command of a run, its folder, and its environment variables."""
    batch_flag = "--global-batch-size" if planned["study"] == "strong" else "--batch-size"
    flags = [batch_flag, planned["batch"], "--epochs", STEPS, "--max-steps", STEPS,
             *shlex.split(planned["flags"])]
    ranks_per_node = int(os.environ.get("SLURM_NTASKS_PER_NODE", planned["ranks"]))
    folder = ROOT / planned["chapter"]
    variables = {"VENV": os.environ.get("VENV", sys.prefix), "SITE": planned["site"],
                 "RANKS": str(planned["ranks"]),
                 "NODES": str(math.ceil(planned["ranks"] / ranks_per_node)),
                 "SLURM_SUBMIT_DIR": str(folder)}
    shell = ["bash", "-l"] if "PBS_NODEFILE" in os.environ else ["bash"]  # -l defines `module`
    return [*shell, SCRIPT, *flags], folder, variables


def measure(folder, **planned):
    """Do a run; return its record. Raises subprocess.SubprocessError if it fails.

    folder: for temporary files; rank 0, perhaps on another node, has to see it.
    """
    command, chapter, variables = script_command(planned)
    records = run_for_records(command, TIMEOUT, chapter, os.environ | variables, folder)
    if records[0]["ranks"] != planned["ranks"]:
        raise subprocess.SubprocessError(
            f"{records[0]['ranks']} ranks were started: `launch` of the site {planned['site']} "
            "must start RANKS ranks")
    return records[0] | {"launcher": f"{SCRIPT}, SITE={planned['site']}"}


def summary(records: pandas.DataFrame) -> pandas.DataFrame:
    """Return median, lowest and highest images/s of repeated runs, with efficiency and remarks.

    Efficiency is images/s per rank, relative to the run with the fewest ranks and the same chapter,
    flags, site and processor. In the batch study it is images/s, relative to the best batch size.
    """
    records = records.astype({"others": float})  # None in a batch job
    series = ["study", "flags", "site", "processor", "chapter"]
    runs = records.groupby([*series, "ranks", "batch"])
    rows = runs["images_per_second"].agg(median="median", least="min", most="max", repeats="size")
    rows = rows.join(runs[["device", "cpus", "nodes"]].first()).join(runs["others"].max())
    rows = rows.reset_index()
    best = rows.groupby(series)["median"].transform("max")
    rows["per_rank"] = rows["median"] / rows["ranks"]
    fewest_ranks = rows.groupby([*series, "batch"])["per_rank"].transform("first")
    rows["efficiency"] = rows["per_rank"] / fewest_ranks
    is_batch = rows["study"] == "batch"
    rows.loc[is_batch, "efficiency"] = (rows["median"] / best)[is_batch]
    rows["remarks"] = [remarks(row) for row in rows.itertuples()]
    return rows


def remarks(row):
    """Return why a row of the summary may mislead, as text."""
    texts = []
    if row.device == "cpu" and row.ranks > row.cpus * row.nodes:
        texts.append("more ranks than cores")
    spread = (row.most - row.least) / row.median
    if spread > 0.2:
        texts.append(f"spread {spread:.0%}")
    if row.others > BUSY:
        texts.append(f"other programs used up to {row.others:.0%} of the cores")
    return "; ".join(texts)


def table(records: pandas.DataFrame) -> str:
    """Return the summary as text: a block per study, flags, site and processor."""
    columns = ["chapter", "ranks", "batch", "median", "least", "most", "repeats", "efficiency",
               "remarks"]
    blocks = []
    for (study, *place), rows in summary(records).groupby(["study", "flags", "site", "processor"]):
        text = rows[columns].to_string(index=False, float_format="{:,.2f}".format)
        blocks.append(f"{TITLES[study]}; images/s\n{'; '.join(place)}\n{text}")
    return "\n\n".join(blocks)


def parse_args():
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    usage = "%(prog)s batch|weak|strong ... [options] [-- FLAGS of main.py]"
    parser = Parser(__doc__, usage=usage)
    add = parser.add_argument
    add("studies", nargs="+", choices=tuple(TITLES))
    add("--chapters", nargs="+", default=["03_ddp"], help="folders with a main.py (03_ddp)")
    add("--ranks", nargs="+", type=int, default=[1, 2, 4],
        help="numbers of ranks for weak and strong (1 2 4)")
    add("--batch-sizes", nargs="+", type=int, default=[64, 128, 256, 512, 1024],
        help="batch sizes that the study batch compares (64 ... 1024)")
    add("--batch-size", type=int, default=64,
        help="batch per rank for weak, global batch for strong (64)")
    add("--repeats", type=int, default=5, help="repeats of each run (5)")
    add("--results", type=Path, required=True, metavar="FILE",
        help="file to append a JSON line per run to")
    args = parser.parse_args(arguments[:end])
    args.flags = arguments[end + 1:]
    args.chapters = [chapter.rstrip("/") for chapter in args.chapters]
    args.results = args.results.absolute()
    if min(*args.ranks, *args.batch_sizes, args.batch_size, args.repeats) < 1:
        parser.error("--ranks, --batch-sizes, --batch-size and --repeats: must be 1 or more")
    for flag in args.flags:
        if flag.partition("=")[0] in ("--batch-size", "--global-batch-size", "--results"):
            parser.error(f"sweep.py sets {flag}: put it before --")
    for chapter in args.chapters:
        if not os.path.isfile(ROOT / chapter / SCRIPT):
            parser.error(f"{chapter} is not a chapter: name folders with a submit script, such as "
                         "03_ddp")
        if problem := install_problem(chapter):
            parser.error(problem)
    if not os.access(args.results.parent, os.W_OK):
        parser.error(f"cannot write {args.results}: name a file in a folder that you can write to")
    return args


def main():
    args = parse_args()
    end_on_sigterm()
    plan = plan_runs(args)
    runs = [planned for planned in plan if not find_records(args.results, planned)]
    print(f"{len(plan) - len(runs)} of {len(plan)} runs are in {args.results} already",
          file=sys.stderr)
    failed = 0
    with tqdm(runs, unit="run", disable=None) as bar:
        for planned in bar:
            try:
                run_unless_recorded(args.results, planned, partial(measure, args.results.parent))
            except subprocess.SubprocessError as problem:
                failed += 1
                name = "{study} {chapter} on {ranks}, batch {batch}".format_map(planned)
                bar.write(f"{name}: {describe_failure(problem)}", file=sys.stderr)
    if records := read_records(args.results):
        print(table(pandas.DataFrame(records)))
    if failed:
        sys.exit(f"sweep.py: {failed} of {len(runs)} runs failed; "
                 "run the same command to retry them")


if __name__ == "__main__":
    main()
