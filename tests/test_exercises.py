"""The exercises' grader: right for each reference solution, and the typical mistake's own hint for each wrong one."""

import ast
import re
import sys

import forked
import pytest
from conftest import ROOT, environment, execute, skip_without

sys.path.insert(0, str(ROOT / "exercises"))
from grade import FOLDERS, load

WRONG = {(number, name): wrong for number in FOLDERS
         for name, wrong in load(ROOT / "tests" / "wrong" / f"{FOLDERS[number].name}.py", "wrong").WRONG.items()}
RIGHT, NOT_YET, NOT_RUN = 0, 1, 2


def marks(number):
    return skip_without("02_horovod") if number == 4 else ()


EACH = [pytest.param(number, marks=marks(number)) for number in FOLDERS]


def graded(number, text, tmp_path):
    """What the grader says of a solution with this text."""
    file = tmp_path / "exercise.py"
    file.write_text(text)
    return forked.run([ROOT / "exercises" / "grade.py", number, "--file", file], 1, environment(),
                      timeout=90)  # 15 s where nothing else runs; runner.py ends it after 60


@pytest.mark.parametrize("number", EACH)
def test_the_reference_solution_passes(number, tmp_path):
    done = graded(number, (FOLDERS[number] / "solution.py").read_text(), tmp_path)
    assert done.code == RIGHT and "all right" in done.out, done.out + done.err


def test_what_an_exercise_gives_is_the_same_in_its_solution():
    """Classes and functions without a hole, but for those that the learner changes."""
    lessons = {(3, "main"), (4, "main"), (8, "Best")}
    compared, differing = 0, set()
    for number, folder in FOLDERS.items():
        ours, theirs = ({node.name: ast.dump(node) for node in ast.parse((folder / name).read_text()).body
                         if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
                        for name in ("exercise.py", "solution.py"))
        for name in ours.keys() & theirs.keys():
            if "NotImplementedError" not in ours[name]:
                compared += 1
                differing |= {(number, name)} if ours[name] != theirs[name] else set()
    assert compared >= 8 and differing == lessons


@pytest.mark.parametrize("number", EACH)
def test_what_is_not_begun_is_said(number):
    done = execute([sys.executable, ROOT / "exercises" / "grade.py", number], timeout=60)
    assert done.code in (NOT_YET, NOT_RUN) and "hint: " in done.out and "Traceback" not in done.out + done.err


@pytest.mark.parametrize(("number", "name"), [pytest.param(*case, marks=marks(case[0])) for case in WRONG])
def test_a_wrong_solution_has_its_hint(number, name, tmp_path):
    changes, hint = WRONG[number, name]
    text = (FOLDERS[number] / "solution.py").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    done = graded(number, text, tmp_path)
    said = done.out.split("hint: ")[-1]
    assert done.code in (NOT_YET, NOT_RUN) and hint in said, done.out + done.err
    assert done.out.count("hint: ") == 1 and "Traceback" not in done.out + done.err


@pytest.mark.parametrize(("text", "said"), [
    ("def broken(:\n", "line 1: invalid syntax"),
    ("print('all right', flush=True)\nraise SystemExit(0)\n", "SystemExit"),
    ("import os\nprint('all right', flush=True)\nos._exit(0)\n", "ended before its function returned"),
    ("while True:\n    pass\n", "rank 0 at line ")],
    ids=["syntax", "leaves", "leaves at once", "endless"])
def test_a_file_that_does_not_run(text, said, tmp_path):
    done = graded(1, text, tmp_path)
    assert done.code == NOT_RUN and said in done.out + done.err, done.out + done.err
    assert "Traceback" not in done.out + done.err


def test_what_is_counted_is_what_the_formulae_say(tmp_path):
    """Exercise 10 shows both to the learner."""
    done = graded(10, (FOLDERS[10] / "solution.py").read_text(), tmp_path)
    rows = re.findall(r"^  (?:GB|bytes).* ([\d.,]+) +([\d.,]+)$", done.out, re.M)
    assert len(rows) == 4 and all(computed == counted for computed, counted in rows), done.out
