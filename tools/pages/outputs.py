"""Record the output of every command that a page shows, in assets/records/outputs.jsonl.

`make docs` writes these records into the pages; it runs no chapter itself.
"""

import subprocess

from submit.study import RECORDS, command, environment, machine, study
from tools.pages import docs


def output(chapter: str, ranks: int | str, *flags: str) -> str:
    """Return what a run prints; errors go to the terminal. Raises subprocess.CalledProcessError."""
    process = subprocess.run(
        command(chapter, int(ranks), *flags), env=environment(), check=True, text=True,
        timeout=600, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    return process.stdout.strip()


def measure(words):
    return {"words": words, "text": output(*words.split())} | machine()


def commands_on_pages():
    """Return the commands of all fences that show a run's output, in the order of the pages."""
    commands = [match[2] for path in docs.pages()
                for match in docs.FENCE.finditer(path.read_text())
                if match[1] in ("output", "sample")]
    return list(dict.fromkeys(commands))


if __name__ == "__main__":
    study(RECORDS / "outputs.jsonl", [{"words": words} for words in commands_on_pages()], measure)
