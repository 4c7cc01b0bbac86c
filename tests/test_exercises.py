"""The exercises' grader: right for each solution, a hint of its own for each typical mistake."""

import ast
import re
import runpy
import shutil

import forked
import pytest
from conftest import ROOT, environment, execute, skip_without

from exercises.grade import FOLDERS

WRONG = {(number, name): wrong for number, folder in FOLDERS.items()
         for name, wrong in runpy.run_path(f"{ROOT}/tests/wrong/{folder.name}.py")["WRONG"].items()}
RIGHT, NOT_YET, NOT_RUN = 0, 1, 2


def cases(values, slow):
    """Cases of a number, or of a number and a name; `slow` numbers are left to make test-all."""
    params = []
    for value in values:
        marks = [skip_without("02_horovod")] if value[0] == 4 else []
        if value[0] in slow:
            marks.append(pytest.mark.slow)
        if value[0] == 1:
            marks.append(pytest.mark.core)
        params.append(pytest.param(*value, marks=marks))
    return params


NUMBERS = [(number,) for number in FOLDERS]


def solution(number, tmp_path):
    """Return the text of an exercise's solution, which is a file of its own or a diff."""
    folder = FOLDERS[number]
    if (folder / "solution.py").exists():
        return (folder / "solution.py").read_text()
    work = tmp_path / "solution"
    work.mkdir()
    shutil.copy(folder / "exercise.py", work)
    assert execute(["git", "apply", folder / "solution.diff"], cwd=work).code == 0
    return (work / "exercise.py").read_text()


def graded(number, *flags):
    """Return what the grader says of exercise.py, or of another file; it stops after a minute."""
    words = [ROOT / "exercises" / "grade.py", number, *flags]
    return forked.run(words, 1, environment(), timeout=90)


def graded_text(number, text, tmp_path):
    file = tmp_path / "exercise.py"
    file.write_text(text)
    return graded(number, "--file", file)


@pytest.mark.parametrize("number", cases(NUMBERS, slow=[]))
def test_the_solution_passes(number, tmp_path):
    done = graded_text(number, solution(number, tmp_path), tmp_path)
    assert done.code == RIGHT and "all right" in done.out, done.out + done.err
    if number == 10:  # shows what it has counted, too
        rows = re.findall(r"^  (?:GB|bytes).* ([\d.,]+) +([\d.,]+)$", done.out, re.M)
        assert len(rows) == 4 and all(computed == counted for computed, counted in rows), done.out


@pytest.mark.slow
@pytest.mark.parametrize("name", list("abcdef"))
def test_the_names_of_exercise_9_are_those_of_agree(name):
    folder = FOLDERS[9]
    words = [ROOT / "submit" / "agree.py", "--steps", 1000, folder / "scripts" / f"{name}.py"]
    done = forked.run(words, 2, environment(), timeout=90)
    answers = runpy.run_path(str(folder / "solution.py"))["ANSWERS"]
    assert f"verdict: wrong: {answers[name]}\n" in done.out, done.out + done.err


@pytest.mark.check
def test_what_an_exercise_gives_is_the_same_in_its_solution():
    """Classes and functions without a hole; a diff shows what it changes."""
    for folder in FOLDERS.values():
        if not (folder / "solution.py").exists():
            continue
        exercise, answer = ({node.name: ast.dump(node)
                             for node in ast.parse((folder / name).read_text()).body
                             if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
                            for name in ("exercise.py", "solution.py"))
        for name in exercise.keys() & answer.keys():
            assert "NotImplementedError" in exercise[name] or exercise[name] == answer[name]


@pytest.mark.parametrize("number", cases(NUMBERS, slow=[8]))
def test_an_untouched_exercise_gets_a_hint(number):
    done = graded(number)
    assert done.code in (NOT_YET, NOT_RUN) and "hint: " in done.out
    assert "Traceback" not in done.out + done.err


@pytest.mark.parametrize(("number", "name"), cases(WRONG, slow=[3, 4, 8]))
def test_a_wrong_solution_has_its_hint(number, name, tmp_path):
    changes, hint = WRONG[number, name]
    text = solution(number, tmp_path)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    done = graded_text(number, text, tmp_path)
    assert done.code in (NOT_YET, NOT_RUN), done.out + done.err
    assert hint in done.out.split("hint: ")[-1], done.out
    assert done.out.count("hint: ") == 1 and "Traceback" not in done.out + done.err


@pytest.mark.fault
@pytest.mark.parametrize(("text", "problem"), [
    ("import os\nprint('all right', flush=True)\nos._exit(0)\n", "ended before its function"),
    pytest.param("while True:\n    pass\n", "rank 0 at line ", marks=pytest.mark.slow)],
    ids=["leaves at once", "endless"])
def test_a_file_that_does_not_run(text, problem, tmp_path):
    done = graded_text(1, text, tmp_path)
    assert done.code == NOT_RUN and problem in done.out, done.out + done.err
