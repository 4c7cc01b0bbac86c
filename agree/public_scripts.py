"""Compare agree's verdicts on public scripts, run on 2 ranks, with the truth.

    python public_scripts.py [--mirror FOLDER] [NAME...]      # appends to public_scripts.jsonl

public_scripts.json has a case for each script: repository, commit, how to start it, the true
verdict ("truth") and how it was found without agree ("evidence"), and the edits that make it run
here on small stand-ins for its data: [offset, length to delete, replacement]. A case with a planted
mistake names the case of its original script in "of". Each repository is cloned into a temporary
folder, from GitHub or FOLDER/owner+name.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch

CASES = Path(__file__).with_suffix(".json")
RECORDS = Path(__file__).with_suffix(".jsonl")
LAUNCHERS = {
    "mpiexec": [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr",
                 "localhost", "--nproc-per-node", "2"]}
SECONDS = 300  # per case


def checkout_case(case, mirror, folder):
    """Clone a case's files into a folder, edit them, and make the stand-ins for its data."""
    source = f"https://github.com/{case['repository']}"
    if mirror:
        heads = (mirror / case["repository"].replace("/", "+")).glob("**/HEAD")
        source = next((head.parent for head in heads), source)
    subprocess.run(["git", "clone", "-q", "--no-checkout", "--filter=blob:none", source, folder],
                   check=True, stderr=subprocess.DEVNULL)
    subprocess.run(["git", "checkout", "-q", case["commit"], "--", *case["paths"]], cwd=folder,
                   check=True)
    for name, changes in case.get("edits", {}).items():
        path = Path(folder, name)
        text = path.read_text()
        for offset, length, replacement in sorted(changes, reverse=True):
            text = text[:offset] + replacement + text[offset + length:]
        path.write_text(text)
    code = "\n".join(case.get("stand_ins", []))
    subprocess.run([sys.executable, "-c", code], cwd=Path(folder, case.get("cwd", ".")), check=True)


def run(case, folder):
    """Run a case under agree; return what it printed."""
    script = ["-m", case["module"]] if "module" in case else [str(Path(folder, case["script"]))]
    arguments = shlex.split(case.get("arguments", "").format(folder=folder))
    command = [*LAUNCHERS[case["launcher"]], "-m", "agree", *script, *arguments]
    variables = {name: text.format(folder=folder)
                 for name, text in case.get("variables", {}).items()}
    paths = f"{CASES.parent}:{variables.pop('PYTHONPATH', '')}"  # this agree, not the installed one
    process = subprocess.run(
        ["timeout", "--kill-after=30", str(SECONDS), *command], stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
        cwd=Path(folder, case.get("cwd", ".")),
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
        | variables)
    return process.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--mirror", type=Path, help="folder of clones named owner+name")
    args = parser.parse_args()
    by_name = {case["name"]: case for case in json.loads(CASES.read_text())}
    for name in args.names or by_name:
        case = by_name.get(by_name[name].get("of"), {}) | by_name[name]
        missing = [package for package in case.get("packages", []) if not find_spec(package)]
        if missing:
            print(f"{name}: needs {', '.join(missing)}", flush=True)
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            checkout_case(case, args.mirror, folder)
            printed = run(case, folder)
        verdict = re.search("^verdict: (?:wrong: )?(.*)|^agree: (?!waiting)(.*)", printed, re.M)
        row = {"script": name, "verdict": verdict and (verdict[1] or verdict[2]),
               "truth": case["truth"], "seconds": round(time.monotonic() - started),
               "torch": torch.__version__}
        print(row if row["verdict"] == row["truth"] else f"{printed}\n{row}", flush=True)
        with open(RECORDS, "a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
