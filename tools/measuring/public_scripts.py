"""Check agree.py's verdicts on public scripts, run on 2 ranks; print a table.

    python -m tools.measuring.public_scripts [--mirror FOLDER] [--publish] [NAME...]

public_scripts.json has a case for each script: repository, commit, how to start it, the true
verdict ("truth") and how it was found without agree.py ("evidence"), and the edits that make it run
here on small stand-ins for its data: [offset, length to delete, replacement]. A case with a planted
mistake names the case of its original script in "of". Each repository is cloned into a temporary
folder, from GitHub or FOLDER/owner+name. Scripts whose packages are missing here are only named.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pandas
import psutil

from cluster.launch import ROOT
from cluster.records import RECORDS, append_records, describe_machine, read_records
from workshop.flags import Parser

AGREE = str(ROOT / "submit" / "agree.py")
CASES = Path(__file__).with_suffix(".json")
PUBLISHED = RECORDS / "public_scripts.jsonl"
COLUMNS = ["script", "verdict", "truth", "right", "seconds"]
LAUNCHERS = {
    "mpiexec": [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr",
                 "localhost", "--nproc-per-node", "2"]}


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


def command_and_env(case, folder):
    """Return the command that runs a case under agree.py, and its environment."""
    script = ["-m", case["module"]] if "module" in case else [str(Path(folder, case["script"]))]
    arguments = shlex.split(case.get("arguments", "").format(folder=folder))
    variables = {name: text.format(folder=folder)
                 for name, text in case.get("variables", {}).items()}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    return [*LAUNCHERS[case["launcher"]], AGREE, *script, *arguments], environment


def run(case, mirror, timeout=300):
    """Run a case under agree.py; return its exit code, output and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        checkout_case(case, mirror, folder)
        command, environment = command_and_env(case, folder)
        started = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = psutil.Popen(
                command, cwd=Path(folder, case.get("cwd", ".")), env=environment, stdout=output,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            try:
                code = process.wait(timeout)
            except psutil.TimeoutExpired:
                code = "time-out"
                for child in process.children(recursive=True):
                    with suppress(psutil.NoSuchProcess):  # torchrun puts them in other sessions
                        child.kill()
                process.kill()
            output.seek(0)
            return code, output.read(), time.monotonic() - started


def judge_case(case, mirror):
    """Return a row of the table, with the verdict, the truth, and whether the verdict is right."""
    code, printed, seconds = run(case, mirror)
    match = re.search("^verdict: (.*)", printed, re.M)
    if not match:
        match = re.search("^agree.py: (?!waiting)(.*)", printed, re.M)
    verdict = match[1].removeprefix("wrong: ") if match else f"no verdict, code {code}"
    return {"script": case["name"], "verdict": verdict, "truth": case["truth"],
            "right": verdict == case["truth"], "seconds": round(seconds)}, printed


def main():
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--mirror", type=Path, help="folder of clones named owner+name")
    parser.add_argument("--publish", action="store_true", help="add to assets/records")
    args = parser.parse_args()
    by_name = {case["name"]: case for case in json.loads(CASES.read_text())}
    cases = [by_name.get(case.get("of"), {}) | case for name, case in by_name.items()
             if not args.names or name in args.names]
    published = {row["script"]: row for row in read_records(PUBLISHED)} if args.publish else {}
    rows = list(published.values())
    for case in cases:
        if case["name"] in published:
            continue
        missing = [name for name in case.get("packages", []) if not find_spec(name)]
        if missing:
            print(f"{case['name']}: needs {', '.join(missing)}", flush=True)
            continue
        row, printed = judge_case(case, args.mirror)
        rows.append(row)
        if args.publish:
            append_records(PUBLISHED, row | describe_machine())
        print(row if row["right"] else f"{printed}\n{row}", flush=True)
    print(pandas.DataFrame(rows, columns=COLUMNS).to_string(index=False))


if __name__ == "__main__":
    main()
