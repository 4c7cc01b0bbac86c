"""Record assets/records/tour.cast, two minutes for the site's first page, from real runs.

    python -m tools.pages.cast      # with no other program running, in the workshop's environment

A shell runs what is typed, in a clone of the last commit. Output is played faster, in the seconds
given here, without the lines that the demo prints while it waits.
"""

import json
import os
import re
import sys
import tempfile
import time

import pexpect

from cluster.launch import ROOT, run_job
from cluster.records import RECORDS, processor_name, usable_cores

CAST = RECORDS / "tour.cast"
COLUMNS, ROWS = 108, 30
HEARTBEAT = re.compile(r"  \(.*: \d+ s\)\r+\n")  # of tools/measuring/demo.py
SCENES = [  # what is typed, seconds in which its output is played, seconds to read it
    ("# 1. Train each chapter's network on one rank, then on two. No GPU is needed.", 0, 1),
    ("make demo PASSES=1", 28, 8),
    ("# 2. Does my own script train one network? This one has a mistake in one line:", 0, 1),
    (". .venv/bin/activate; cd 03_ddp", 0, 0),
    ("sed 's/ddp(images).*/model(images), labels)/' your_script_ddp.py > my_train.py", 0, 0),
    ("diff your_script_ddp.py my_train.py", 0, 4),
    ("mpiexec -n 2 agree my_train.py; cd ..", 8, 10),
    ("# 3. What would each of 64 GPUs keep and send? Counting it needs no GPU.", 0, 1),
    ("python -m cluster.footprint --ranks 64 --gpus-per-node 8 05_zero/fsdp.py --layers 32 "
     "--width 4096 --heads 32 --context 4096 --text synthetic --precision bf16 --batch-size 1",
     5, 9),
    ("# 4. Which layout is fastest on 64 H100s, and how many days do 100 billion tokens take?",
     0, 1),
    ("python -m cluster.plan --layers 32 --width 4096 --heads 32 --context 4096 --vocabulary 32000 "
     f"--gpu h100 --gpus 64 --global-batch-tokens 1M --tokens 100B | cut -c -{COLUMNS}", 2, 11),
]


def run(shell, line):
    """Run a line; return (seconds since then, text) for each line of output, and the prompt."""
    start, lines, has_ended = time.monotonic(), [], False
    shell.sendline(line)
    while not has_ended:
        has_ended = shell.expect([r"\n", r"\$ $"], timeout=None)
        text = HEARTBEAT.sub("", shell.before + shell.after)
        lines.append((time.monotonic() - start, text))
    return lines


def record(shell, title):
    """Return the cast's events: [seconds, "o" for output, text]."""
    seconds, events = 3.0, [[0, "o", f"# {title}\r\n$ "]]
    for line, duration, pause in SCENES:
        if line.startswith("#") and len(events) > 1:  # clear the screen, except for the prompt
            events.append([seconds, "o", "\x1b[H\x1b[2J" + events[-1][2].split("\n")[-1]])
        for character in (*line, "\r\n"):
            events.append([seconds, "o", character])
            seconds += 0.025
        lines = run(shell, line)
        speed = duration / lines[-1][0]
        events += [[seconds + delay * speed, "o", text] for delay, text in lines]
        seconds += duration + pause
    return [*events, [seconds, "o", ""]]


def main():
    with tempfile.TemporaryDirectory() as folder:
        run_job(["git", "clone", "--quiet", ROOT, folder])
        os.symlink(sys.prefix, f"{folder}/.venv")
        commit = run_job(["git", "describe", "--always"], cwd=folder).strip()
        title = (f"Recorded on {time.strftime('%d %B %Y')} at commit {commit}. {processor_name()}, "
                 f"cores: {usable_cores()}. Waiting is cut short.")
        environment = os.environ | {"PS1": "$ ", "TERM": "xterm-256color"}
        with pexpect.spawn("bash", ["--norc", "--noediting"], cwd=folder, env=environment,
                           echo=False, dimensions=(ROWS, COLUMNS), encoding="utf-8") as shell:
            shell.expect_exact("$ ")
            events = record(shell, title)
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": title}
    rows = [header, *([round(seconds, 3), kind, text] for seconds, kind, text in events)]
    CAST.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
