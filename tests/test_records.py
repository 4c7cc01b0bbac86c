"""What is published is of a commit: dirty trees are refused where it is written, dirty records where it is shown."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import records
from conftest import ROOT, execute

from tools.pages import docs

MEASURED = sorted([*records.RECORDS.glob("*.jsonl"), *records.RECORDS.glob("bench*.txt")])
IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@example.org"]


def git(folder, *words):
    return subprocess.run(["git", "-C", folder, *IDENTITY, *words], capture_output=True, text=True)


def marks(path):
    """The commits that a file's records name."""
    if path.suffix == ".txt":
        return re.findall(r", (\S+), \d{4}-\d\d-\d\dT", path.read_text().splitlines()[0]) or [None]
    return [json.loads(line).get("git") for line in path.read_text().splitlines()]


@pytest.mark.check
@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_what_is_published_is_of_a_commit_of_this_history(path):
    found = set(marks(path))
    assert found and all(map(records.clean, found)), f"{path.name}: {found}: make it again from a clean commit"
    if git(ROOT, "rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("a shallow clone, or no repository: the history is not here")
    for mark in found:
        assert git(ROOT, "merge-base", "--is-ancestor", mark, "HEAD").returncode == 0, f"{mark} is not in this history"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of the programs, with a history of one commit, that takes the place of the repository."""
    folder = tmp_path / "workshop"
    for name in "submit", "tools", "03_ddp", "exercises", "assets/records":
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    git(folder, "init")
    git(folder, "add", ".")
    assert git(folder, "commit", "-m", "all").returncode == 0
    monkeypatch.setattr(records, "ROOT", folder)
    monkeypatch.setattr(records, "ASSETS", folder / "assets")
    return folder


@pytest.mark.check
def test_what_makes_a_tree_dirty_and_where_that_matters(tree, tmp_path):
    """An attendee edits a main.py and sweeps it: the records say so, that is all."""
    head = git(tree, "rev-parse", "--short", "HEAD").stdout.strip()
    for name in "assets/records/zero.jsonl", "submit/README.md", "exercises/2_ring/exercise.py", "results.jsonl":
        (tree / name).write_text("measured\n")
    assert records.commit() == head, "measuring and learners write such files"
    assert records.refusal(tree / "assets" / "records" / "weak.jsonl") is None
    (tree / "03_ddp" / "main.py").write_text("")
    assert records.commit() == f"{head}-dirty"
    assert "commit or stash your changes first" in records.refusal(tree / "assets" / "records" / "weak.jsonl")
    assert records.refusal(tree / "weak.jsonl") is None and records.refusal(tmp_path) is None
    shutil.rmtree(tree / ".git")
    assert records.commit() == "no-commit"


@pytest.mark.check
def test_nothing_is_published_from_a_dirty_tree(tree):
    """One line, nothing run, nothing written."""
    (tree / "submit" / "launch.py").write_text((tree / "submit" / "launch.py").read_text() + "\n")
    before = {path: path.read_bytes() for path in (tree / "assets" / "records").iterdir()}
    done = execute([sys.executable, "-m", "tools.measuring.zero"], cwd=tree, timeout=60)
    assert done.code and not done.out and "-dirty: commit or stash your changes first" in done.err, done.err
    assert done.err.count("\n") == 1
    assert {path: path.read_bytes() for path in (tree / "assets" / "records").iterdir()} == before


@pytest.mark.check
def test_what_is_not_of_a_commit_is_not_shown(tmp_path, monkeypatch):
    (tmp_path / "weak.jsonl").write_text(json.dumps({"git": "1234567"}) + "\n" + json.dumps({"git": "1234567-dirty"}))
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    with pytest.raises(records.Unpublished, match=r"^assets/records/weak.jsonl, record 2: made by 1234567-dirty"):
        docs.table("weak")
