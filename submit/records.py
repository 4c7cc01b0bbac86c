"""Which commit a record is of, and which records may be published: those in assets/, which the pages show.

Every record names the commit of the code that made it, with -dirty behind it where the code is not that commit's. Such
records are fine anywhere but in assets/: programs that write there refuse to start, and what draws figures and tables
from there refuses the record. What lies in assets/, and pages and notebooks (*.md, *.ipynb), are what measuring writes
and change no measurement: they make nothing dirty, so that several studies can be made one after the other, and
committed together. Nor do a learner's answers to exercises, and files that git does not know.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "assets"
RECORDS, FIGURES = ASSETS / "records", ASSETS / "figures"
OUTPUTS = [":(exclude)assets", ":(exclude)*.md", ":(exclude)*.ipynb", ":(exclude)exercises/*/exercise.py"]
UNKNOWN = "no-commit"  # a tree without its history, or without git


class Unpublished(ValueError):
    """A record in assets/ is not of a commit; notebooks show the line alone."""

    def _render_traceback_(self):  # IPython's own hook
        return [str(self)]


def commit() -> str:
    """The commit of this tree, as 4cf4026, 4cf4026-dirty or no-commit."""
    if not shutil.which("git") or not (ROOT / ".git").exists():  # else git would find a repository around it
        return UNKNOWN
    git = ["git", "--no-optional-locks", "-C", ROOT]  # several ranks may ask at once
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changes = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no", "--", ".", *OUTPUTS],
                             capture_output=True, text=True)
    if head.returncode or changes.returncode:  # no commit yet, or git does not trust the folder's owner
        return UNKNOWN
    return head.stdout.strip() + ("-dirty" if changes.stdout else "")


def clean(mark):
    """Whether a record's mark names a commit and nothing else."""
    return re.fullmatch("[0-9a-f]{7,40}", str(mark)) is not None


def refusal(path: "str | os.PathLike") -> "str | None":  # quoted: a notebook's Python may be 3.9
    """Why nothing may be written to a path now, as a line; None if it may, or if it is not in assets/."""
    path = Path(path).resolve()
    if path != ASSETS and ASSETS not in path.parents:
        return None
    mark = commit()
    if clean(mark):
        return None
    if mark == UNKNOWN:
        return f"{path.relative_to(ROOT)} is published, and this tree has no history: measure in a clone made by git"
    return (f"{path.relative_to(ROOT)} is published, and this tree is {mark}: commit or stash your changes first")


def opens(path: "str | os.PathLike") -> bool:
    """Whether a file of this name opens for writing, which its folder's rights do not tell.

    Nothing is left behind, nor seen meanwhile: another job may just write the file itself.
    """
    try:
        if os.path.lexists(path):
            open(path, "a").close()
        else:
            NamedTemporaryFile(dir=os.path.dirname(path), prefix=os.path.basename(path)).close()
    except OSError:
        return False
    return True


def published(name: str) -> list[dict]:
    """The records of assets/records/NAME, one dict a line. Raises Unpublished where one is not of a commit."""
    records = []
    for number, line in enumerate((RECORDS / name).read_text().splitlines(), 1):
        record = json.loads(line)
        check(f"assets/records/{name}, record {number}", record.get("git"))
        records.append(record)
    return records


def published_text(name: str) -> str:
    """The text of assets/records/NAME, a benchmark's, whose first line names its commit before the time."""
    text = (RECORDS / name).read_text()
    mark = re.search(r", (\S+), \d{4}-\d\d-\d\dT", text.partition("\n")[0])
    check(f"assets/records/{name}, first line", mark and mark[1])
    return text


def check(where, mark):
    """Raise Unpublished where the mark of a record is not that of a commit."""
    if not clean(mark):
        raise Unpublished(f"{where}: made by {mark or 'an unnamed commit'}: make it again from a clean commit "
                          "(CONTRIBUTING.md, What is published)")
