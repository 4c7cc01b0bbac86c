"""Record in assets/records/outputs.jsonl what the commands print whose output the pages show.

`make docs` writes these records into the pages: it runs no chapter.
"""

import subprocess

from submit.study import RECORDS, command, environment, machine, study
from tools.pages import docs


def output(chapter: str, ranks: int | str, *flags: str) -> str:
    """Return what a run prints; errors go to the terminal. Raises subprocess.CalledProcessError."""
    done = subprocess.run(command(chapter, int(ranks), *flags), env=environment(), check=True,
                          text=True, timeout=600, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    return done.stdout.strip()


def measure(words):
    return {"words": words, "text": output(*words.split())} | machine()


def shown():
    """Return the words of each fence that shows what a run prints, in the order of the pages."""
    words = [match[2] for path in docs.pages() for match in docs.FENCE.finditer(path.read_text())
             if match[1] in ("output", "sample")]
    return list(dict.fromkeys(words))


if __name__ == "__main__":
    study(RECORDS / "outputs.jsonl", [{"words": words} for words in shown()], measure)
