"""A study whose runs return what is published, killed in one of them: `python killed_study.py NAME FOLDER WHICH`.

In the top folder. Notes each run that it begins, in FOLDER/begun.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path[0] = os.getcwd()
name, folder, kill_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
program = importlib.import_module(f"tools.measuring.{name}")
records = Path("assets", "records", f"{ {'reading': 'read_data'}.get(name, name) }.jsonl")
published = [json.loads(line) for line in records.read_text().splitlines()]
begun, study = folder / "begun", program.study


def begin(run):
    with open(begun, "a") as file:
        file.write(json.dumps(run) + "\n")
    if len(begun.read_text().splitlines()) == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


def do(plan, run):
    begin(run)
    each = len(published) // len(plan)
    found = published[plan.index(run) * each:][:each]
    return found if each > 1 else found[0]


program.study = lambda path, plan, _, *check: study(folder / path.name, plan, lambda **run: do(plan, run), *check)
program.refusal = lambda path: None
sys.argv = [name]
program.main()
