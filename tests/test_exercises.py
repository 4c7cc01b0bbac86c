"""The exercises' grader: right for each reference solution, and the typical mistake's own hint for each wrong one."""

import ast
import re
import runpy
import sys

import forked
import pytest
from conftest import ROOT, environment, skip_without

sys.path.insert(0, str(ROOT / "exercises"))
from grade import FOLDERS

WRONG = {(number, name): wrong for number in FOLDERS
         for name, wrong in runpy.run_path(ROOT / "tests" / "wrong" / f"{FOLDERS[number].name}.py")["WRONG"].items()}
RIGHT, NOT_YET, NOT_RUN = 0, 1, 2


def cases(values, slow):
    """Cases of a number, or of a number and a name; what is in `slow` is left to `make test-all`."""
    return [pytest.param(*value, marks=[*[skip_without("02_horovod")] * (value[0] == 4),
                                        *[pytest.mark.slow] * (value[0] in slow),
                                        *[pytest.mark.core] * (value[0] == 1)]) for value in values]


EACH = [(number,) for number in FOLDERS]


def graded(number, *flags):
    """What the grader says of exercise.py, or of another file."""
    return forked.run([ROOT / "exercises" / "grade.py", number, *flags], 1, environment(),
                      timeout=90)  # 15 s where nothing else runs; runner.py ends it after 60


def graded_text(number, text, tmp_path):
    file = tmp_path / "exercise.py"
    file.write_text(text)
    return graded(number, "--file", file)


@pytest.mark.parametrize("number", cases(EACH, slow=[9]))
def test_the_reference_solution_passes(number, tmp_path):
    done = graded_text(number, (FOLDERS[number] / "solution.py").read_text(), tmp_path)
    assert done.code == RIGHT and "all right" in done.out, done.out + done.err
    if number == 10:  # shows to the learner what it has counted, too
        rows = re.findall(r"^  (?:GB|bytes).* ([\d.,]+) +([\d.,]+)$", done.out, re.M)
        assert len(rows) == 4 and all(computed == counted for computed, counted in rows), done.out


@pytest.mark.check
def test_what_an_exercise_gives_is_the_same_in_its_solution():
    """Classes and functions without a hole, but for those that the learner changes."""
    differing = set()
    for number, folder in FOLDERS.items():
        ours, theirs = ({node.name: ast.dump(node) for node in ast.parse((folder / name).read_text()).body
                         if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
                        for name in ("exercise.py", "solution.py"))
        differing |= {(number, name) for name in ours.keys() & theirs.keys()
                      if "NotImplementedError" not in ours[name] and ours[name] != theirs[name]}
    assert differing == {(3, "main"), (4, "main"), (8, "Best")}


@pytest.mark.parametrize("number", cases(EACH, slow=[8, 9]))
def test_what_is_not_begun_is_said(number):
    done = graded(number)
    assert done.code in (NOT_YET, NOT_RUN) and "hint: " in done.out and "Traceback" not in done.out + done.err


@pytest.mark.parametrize(("number", "name"), cases(WRONG, slow=[3, 4, 8, 9]))
def test_a_wrong_solution_has_its_hint(number, name, tmp_path):
    changes, hint = WRONG[number, name]
    text = (FOLDERS[number] / "solution.py").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    done = graded_text(number, text, tmp_path)
    said = done.out.split("hint: ")[-1]
    assert done.code in (NOT_YET, NOT_RUN) and hint in said, done.out + done.err
    assert done.out.count("hint: ") == 1 and "Traceback" not in done.out + done.err


@pytest.mark.fault
@pytest.mark.parametrize(("text", "said"), [
    ("import os\nprint('all right', flush=True)\nos._exit(0)\n", "ended before its function returned"),
    pytest.param("while True:\n    pass\n", "rank 0 at line ", marks=pytest.mark.slow)],
    ids=["leaves at once", "endless"])
def test_a_file_that_does_not_run(text, said, tmp_path):
    done = graded_text(1, text, tmp_path)
    assert done.code == NOT_RUN and said in done.out, done.out + done.err
