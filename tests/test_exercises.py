"""The grader: every solution passes, and each typical mistake gets its own hint."""

import runpy
import shutil

import forked
import pytest
from conftest import ROOT, environment, execute, skip_without

from exercises.grade import FAILED, FOLDERS, NOT_RUN, PASSED

WRONG = {(number, name): wrong for number, folder in FOLDERS.items()
         for name, wrong in runpy.run_path(f"{ROOT}/tests/wrong/{folder.name}.py")["WRONG"].items()}


def cases(values, slow):
    """Return cases of numbers, or of numbers and names; `slow` numbers are for make test-all."""
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
    """Return the text of an exercise's solution, which is a file or a diff."""
    folder = FOLDERS[number]
    if (folder / "solution.py").exists():
        return (folder / "solution.py").read_text()
    shutil.copy(folder / "exercise.py", tmp_path)
    assert execute(["git", "apply", folder / "solution.diff"], cwd=tmp_path).code == 0
    return (tmp_path / "exercise.py").read_text()


def run_grader(number, text, tmp_path):
    """Run the grader on a text."""
    file = tmp_path / "exercise.py"
    file.write_text(text)
    words = [ROOT / "exercises" / "grade.py", number, "--file", file]
    return forked.run(words, 1, environment(), timeout=90)


@pytest.mark.parametrize("number", cases(NUMBERS, slow=[]))
def test_the_solution_passes(number, tmp_path):
    done = run_grader(number, solution(number, tmp_path), tmp_path)
    assert done.code == PASSED and "all checks passed" in done.out, done.out + done.err
    if number == 10:  # the ring sends as much as the formula says
        assert "600,000 bytes each" in done.out, done.out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mistake"), runpy.run_path(
    f"{FOLDERS[9]}/solution.py")["ANSWERS"].items())
def test_the_names_of_exercise_9_are_those_of_agree(name, mistake):
    script = FOLDERS[9] / "scripts" / f"{name}.py"
    words = [ROOT / "submit" / "agree.py", "--steps", 1000, script]
    done = forked.run(words, 2, environment(), timeout=90)
    assert f"verdict: wrong: {mistake}\n" in done.out, done.out + done.err


@pytest.mark.parametrize("number", cases(NUMBERS, slow=[8]))
def test_an_untouched_exercise_gets_a_hint(number, tmp_path):
    done = run_grader(number, (FOLDERS[number] / "exercise.py").read_text(), tmp_path)
    assert done.code in (FAILED, NOT_RUN) and "hint: " in done.out
    assert "Traceback" not in done.out + done.err


@pytest.mark.parametrize(("number", "name"), cases(WRONG, slow=[3, 4, 8]))
def test_a_wrong_solution_has_its_hint(number, name, tmp_path):
    changes, hint = WRONG[number, name]
    text = solution(number, tmp_path)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    done = run_grader(number, text, tmp_path)
    assert done.code in (FAILED, NOT_RUN), done.out + done.err
    assert hint in done.out.split("hint: ")[-1], done.out
    assert done.out.count("hint: ") == 1 and "Traceback" not in done.out + done.err
