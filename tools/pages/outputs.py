"""Record what the commands print whose output the pages show. Records: assets/records/outputs.jsonl.

`make docs` writes them into the pages: so it runs no chapter, and changes no rate.
"""

import subprocess

from launch import command, environment, machine
from records import RECORDS
from runs import study

from tools.pages import docs


def output(chapter: str, ranks: int | str, *flags: str) -> str:
    """What a run prints, without its errors, which go to the terminal. Raises subprocess.CalledProcessError."""
    return subprocess.run(command(chapter, int(ranks), *flags), env=environment(), check=True, text=True, timeout=600,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout.strip()


def measure(words):
    return {"words": words, "text": output(*words.split())} | machine()


if __name__ == "__main__":
    study(RECORDS / "outputs.jsonl", [{"words": words} for words in docs.outputs()], measure)
