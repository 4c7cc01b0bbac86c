"""Measure how a chapter scales: throughput by batch size, weak scaling, strong scaling.

    python submit/sweep.py weak --chapters 03_ddp 04_deepspeed --ranks 1 2 4 --results weak.jsonl -- --model resnet18

batch: one rank, a run for each batch size. weak: the batch of a rank stays, the global batch grows with the ranks.
strong: the global batch stays. What stands behind -- goes to every main.py. On this machine as within one allocation of
PBS or Slurm (submit/sweep.pbs, sweep.slurm) a run is the chapter's own submit script with RANKS set: see --dry-run.

Each run appends one line to --results as soon as it ends. Started again with the same file, it runs only what is
missing there or failed; another machine wants another file. All runs of a repeat come before those of the next: what
slows the machine down for a while slows all of them.
"""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas
from launch import ROOT, machine, missing
from one_line import Parser, whole
from records import opens, refusal
from runs import append, end_with_the_study, read
from tqdm import tqdm

STEPS = 35  # 5 of them warm up, 30 are timed
KEY = ["study", "chapter", "ranks", "batch", "flags", "site", "repeat"]


def names(flags):
    """The names of flags, with or without a value behind =."""
    return {flag.partition("=")[0] for flag in flags}


def plan(args):
    """The runs, in their order, each as a dict of KEY; chapter 1 has no more than one rank."""
    site, flags = os.environ.get("SITE", "here"), shlex.join(args.flags)
    runs = []
    for repeat in range(args.repeats):
        for study in args.studies:
            for chapter in args.chapters:
                if study == "batch":
                    cases = [(1, batch) for batch in args.batch_sizes]
                elif chapter.startswith("01"):
                    cases = [(1, args.batch_size)] if 1 in args.ranks else []
                else:
                    cases = [(ranks, args.batch_size) for ranks in args.ranks]
                runs += [dict(zip(KEY, (study, chapter, *case, flags, site, repeat))) for case in cases]
    return runs


def command(run, results, script):
    """The words of a run, its folder and the variables that it needs on top of the environment's."""
    size = "--global-batch-size" if run["study"] == "strong" else "--batch-size"
    flags = [size, str(run["batch"]), *shlex.split(run["flags"]), "--results", str(results)]
    if "--epochs" not in names(flags):  # enough for the steps, however few an epoch of the data set has
        flags += ["--epochs", str(STEPS)]
    nodes = math.ceil(run["ranks"] / int(os.environ.get("SLURM_NTASKS_PER_NODE", run["ranks"])))
    folder = ROOT / run["chapter"]
    env = {"VENV": os.environ.get("VENV", sys.prefix), "SITE": run["site"], "RANKS": str(run["ranks"]),
           "NODES": str(nodes)}
    if script.endswith(".pbs"):  # a PBS script takes its flags from a variable
        return ["bash", "-l", script], folder, env | {"PBS_O_WORKDIR": str(folder), "FLAGS": " ".join(flags)}
    return ["bash", script, *flags], folder, env | {"SLURM_SUBMIT_DIR": str(folder)}


def end(process):
    """End a run and all its ranks."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(run, args):
    """Do a run. Returns its record, or with "failed" the reason why there is none, and what was printed last."""
    with tempfile.TemporaryDirectory(dir=args.results.resolve().parent) as folder:  # rank 0 may be on another node
        results = Path(folder, "results.jsonl")
        words, place, env = command(run, results, args.script)
        process = subprocess.Popen(words, cwd=place, env=os.environ | env, text=True, errors="replace",
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            printed = process.communicate(timeout=args.timeout)[0]
        except subprocess.TimeoutExpired:
            end(process)
            return run | {"failed": f"no end after {args.timeout} s"}
        except BaseException:  # Ctrl-C, or the end of the job
            end(process)
            raise
        mistakes = [line for line in printed.splitlines() if line.startswith("main.py: ")]
        said = mistakes or [line for line in printed.splitlines() if not line.startswith("srun: ")][-1:]
        record = json.loads(results.read_text()) if results.exists() else {}
        if process.returncode or not record:
            reason = said[0] if said else f"exit code {process.returncode}"
        elif record["ranks"] != run["ranks"]:
            reason = f"{record['ranks']} ranks were started: `launch` of sites/{run['site']}.sh has to heed RANKS"
        else:
            return run | record | machine() | {"launcher": f"{args.script} with sites/{run['site']}.sh"}
        return run | {"failed": reason, "printed": printed.splitlines()[-10:]}


def summary(records: pandas.DataFrame) -> pandas.DataFrame:
    """Median, least and most images/s of each group of repeats (a DataFrame), with efficiency and what is remarkable.

    records: a DataFrame. Efficiency in weak and strong scaling: images/s / (ranks * images/s of a rank in the runs with
    the fewest ranks), within a chapter, its flags, the site and the kind of machine; in the batch study: images/s / the
    best of them.
    """
    if "failed" in records:
        records = records[records["failed"].isna()]
    rows, group = [], ["study", "flags", "site", "processor", "chapter"]
    for values, found in records.groupby(group, sort=False) if len(records) else ():
        sizes = found.groupby(["ranks", "batch"])
        speeds, first = sizes["images_per_second"], sizes[["device", "cpus", "nodes", "steps"]].first()
        each = pandas.DataFrame({"median": speeds.median(), "least": speeds.min(), "most": speeds.max(),
                                 "repeats": sizes.size()}).join(first).reset_index()
        if values[0] == "batch":
            each["efficiency"] = each["median"] / each["median"].max()
        else:
            a_rank = each.groupby("batch").apply(lambda these: (these["median"] / these["ranks"]).iloc[0])
            each["efficiency"] = each["median"] / (each["ranks"] * each["batch"].map(a_rank))
        each["remarks"] = [remark(row) for row in each.itertuples()]
        rows.append(each.assign(**dict(zip(group, values))))
    return pandas.concat(rows, ignore_index=True) if rows else pandas.DataFrame()


def remark(row):
    """What is not as it should be in a row of the summary, as text."""
    spread, timed = (row.most - row.least) / row.median, row.steps - 5
    return "; ".join(text for wrong, text in (
        (row.device == "cpu" and row.ranks > row.cpus * row.nodes, "more ranks than cores"),
        (timed < STEPS - 5, f"{timed} timed steps"), (spread > 0.2, f"spread {spread:.0%}"),
        (row.efficiency > 1.05, "efficiency above 1.05")) if wrong)


def command_line(path: str) -> str:
    """The command that makes records like those of a file (relative to the top folder), into a new file."""
    records = read(ROOT / path)
    values = {name: list(dict.fromkeys(record[name] for record in records)) for name in KEY}
    words = [*values["study"], "--chapters", *values["chapter"]]
    words += ["--batch-sizes", *values["batch"]] if values["study"] == ["batch"] else [
        "--ranks", *values["ranks"], "--batch-size", *values["batch"]]
    flags, = values["flags"]
    return " ".join(map(str, ["python submit/sweep.py", *words, "--repeats", len(values["repeat"]), "\\\n    --results",
                              Path(path).name, "--", flags]))


def table(records):
    """The summary as text: a block for each study, set of flags and kind of machine."""
    blocks, found, group = [], summary(records), ["study", "flags", "site", "processor"]
    what = {"batch": "batch size, efficiency: against the best", "weak": "weak scaling, the batch of a rank",
            "strong": "strong scaling, the global batch"}
    for (study, flags, site, processor), rows in found.groupby(group, sort=False) if len(found) else ():
        first, base = rows.iloc[0], "" if study == "batch" else f", efficiency: against {rows['ranks'].min()} rank(s)"
        speed = "{:,.0f}".format if rows["least"].min() >= 100 else "{:,.1f}".format
        columns = ["chapter", "ranks", "batch", "median", "least", "most", "repeats", "efficiency", "remarks"]
        text = rows[columns].rename(columns={"median": "images/s"}).to_string(index=False, formatters={
            "images/s": speed, "least": speed, "most": speed, "efficiency": "{:.2f}".format})
        blocks.append(f"{study}: {what[study]}{base}\n{flags}; site {site}: {processor}, {first['cpus']} cores a node, "
                      f"{first['device']}\n" + "\n".join(line.rstrip() for line in text.splitlines()))
    return "\n\n".join(blocks)


def parse_args():
    words = sys.argv[1:]
    stop = words.index("--") if "--" in words else len(words)
    parser = Parser(__doc__, usage="%(prog)s batch|weak|strong ... [options] [-- FLAGS of main.py]")
    add = parser.add_argument
    add("studies", nargs="+", choices=("batch", "weak", "strong"))
    add("--chapters", nargs="+", default=["03_ddp"], help="folders with a main.py (03_ddp)")
    add("--ranks", nargs="+", type=whole, default=[1, 2, 4], help="for weak and strong (1 2 4)")
    add("--batch-sizes", nargs="+", type=whole, default=[64, 128, 256, 512, 1024], help="for batch (64 ... 1024)")
    add("--batch-size", type=whole, default=64, help="of a rank for weak, of all ranks for strong (64)")
    add("--repeats", type=whole, default=5)
    add("--timeout", type=whole, default=1800, help="seconds that a run may take (1800)")
    add("--results", type=Path, required=True, metavar="FILE", help="the records, one JSON line a run")
    add("--script", choices=("submit.slurm", "submit.pbs"), default="submit.slurm",
        help="of each chapter; submit.pbs within a job of PBS")
    add("--dry-run", action="store_true", help="print the commands that would be run")
    args = parser.parse_args(words[:stop])
    args.flags = words[stop + 1:]
    args.chapters = [chapter.rstrip("/") for chapter in args.chapters]
    if "--max-steps" not in names(args.flags):
        args.flags += ["--max-steps", str(STEPS)]
    for flag in names(args.flags) & {"--batch-size", "--global-batch-size", "--results"}:
        parser.error(f"{flag} stands before --, not behind: it is the sweep's")
    for chapter in args.chapters:
        if not os.path.isfile(ROOT / chapter / args.script):  # pathlib's raises at a name that is too long
            parser.error(f"{chapter} is no chapter: name folders with a submit script, such as 03_ddp")
        if missing(chapter):
            parser.error(missing(chapter))
    for ranks in args.ranks if "strong" in args.studies else ():
        if args.batch_size % ranks:
            parser.error(f"--batch-size {args.batch_size} is no multiple of {ranks} ranks")
    if not plan(args):
        parser.error("nothing to run: chapter 1 has one rank only")
    folder = args.results.resolve().parent  # the runs' own records pass through it
    if not opens(args.results) or not os.access(folder, os.W_OK):
        parser.error(f"cannot write {args.results}: name a file in a folder that exists and that you may write to")
    if reason := refusal(args.results):
        parser.error(reason)
    for word in (*args.flags, str(folder)) if args.script.endswith(".pbs") else ():
        if re.search(r"""[\s*?[\]'"\\]""", word):  # site.sh refuses the same
            parser.error(f"{word!r}: a PBS script takes its flags in one variable, which the shell splits at blanks: "
                         "none may hold a blank, a wildcard, a quote or a backslash")
    return args


def main():
    args = parse_args()
    end_with_the_study()
    done = {tuple(record.get(name) for name in KEY) for record in read(args.results) if "failed" not in record}
    runs = [run for run in plan(args) if tuple(run.values()) not in done]
    if args.dry_run:
        for run in runs:
            words, folder, env = command(run, args.results.resolve(), args.script)
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
            print(f"cd {shlex.quote(str(folder.relative_to(ROOT)))} && {variables} {shlex.join(words)}")
        return
    print(f"{len(plan(args)) - len(runs)} of {len(plan(args))} runs are in {args.results} already", file=sys.stderr)
    images = [run["batch"] * (run["ranks"] if run["study"] == "weak" else 1) for run in runs]
    failed = 0
    with tqdm(total=sum(images), unit="image", disable=None) as bar:  # a step's images tell how long it takes
        for run, size in zip(runs, images):
            bar.set_description("{study} {chapter} on {ranks}, batch {batch}".format_map(run))
            record = measure(run, args)
            append(args.results, record)
            if "failed" in record:
                failed += 1
                bar.write("{study} {chapter} on {ranks}, batch {batch}: {failed}".format_map(record), file=sys.stderr)
            bar.update(size)
    print(table(pandas.DataFrame(read(args.results))))
    if failed:
        sys.exit(f"sweep.py: {failed} of {len(runs)} runs failed; the same command tries them again")


if __name__ == "__main__":
    main()
