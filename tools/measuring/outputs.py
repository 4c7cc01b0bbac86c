"""Record what the commands print whose output the pages show; the records go to assets/records/outputs.jsonl.

    python -m tools.measuring.outputs

`make docs` writes them into the pages: so it runs no chapter, and changes no rate.
"""

import subprocess
import sys

from launch import ROOT, command, environment, machine
from records import refusal
from runs import study

from tools.pages import docs

RECORDS = ROOT / "assets" / "records" / "outputs.jsonl"


def output(chapter, ranks, *flags):
    """What a run prints."""
    return subprocess.run(command(chapter, int(ranks), *flags), env=environment(), check=True, text=True, timeout=600,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout.strip()


def record(words):
    return {"words": words, "text": output(*words.split())} | machine()


def main():
    if reason := refusal(RECORDS):
        sys.exit(f"outputs.py: {reason}")
    study(RECORDS, [{"words": words} for words in docs.outputs()], record)


if __name__ == "__main__":
    main()
