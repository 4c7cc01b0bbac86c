"""The grader: each solution passes, and each typical mistake gets its own hint."""

import runpy
import shutil

import forked
import pytest
from conftest import ROOT, environment, run_command
from wrong_answers import SCATTER, WRONG

from exercises.grade import FAILED, FOLDERS, PASSED

GATHER = """shards = [torch.empty_like(parameter_shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, parameter_shard)
        return torch.cat(shards)
"""
NUMBERS = [(number,) for number in FOLDERS]


def cases(values, slow):
    """Return a case per tuple that begins with an exercise's number; slow: numbers of slow ones."""
    params = []
    for number, *names in values:
        marks = [pytest.mark.slow] if number in slow else []
        if number == 1:
            marks.append(pytest.mark.core)
        params.append(pytest.param(number, *names, marks=marks))
    return params


def solution(number, tmp_path):
    """Return the text of an exercise's solution, which is a file or a diff."""
    folder = FOLDERS[number]
    if (folder / "solution.py").exists():
        return (folder / "solution.py").read_text()
    shutil.copy(folder / "exercise.py", tmp_path)
    assert run_command(["git", "apply", folder / "solution.diff"], cwd=tmp_path).code == 0
    return (tmp_path / "exercise.py").read_text()


def run_grader(number, text, tmp_path):
    """Run the grader on the text of an exercise.py."""
    file = tmp_path / "exercise.py"
    file.write_text(text)
    arguments = [ROOT / "exercises" / "grade.py", number, "--file", file]
    return forked.run(arguments, 1, environment(), timeout=90)


@pytest.mark.parametrize("number", cases(NUMBERS, slow=[]))
def test_each_solution_passes(number, tmp_path):
    result = run_grader(number, solution(number, tmp_path), tmp_path)
    assert result.code == PASSED and "all checks passed" in result.out, result.out + result.err


def test_pytorch_s_new_names_are_accepted_too(tmp_path):
    text = solution(6, tmp_path)
    for old, new in {
            SCATTER: "dist.reduce_scatter_single(shard, gradients)\n",
            GATHER: "vector = torch.empty(3 * len(parameter_shard), dtype=parameter_shard.dtype)\n"
                    "        dist.all_gather_single(vector, parameter_shard)\n"
                    "        return vector\n"}.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    result = run_grader(6, text, tmp_path)
    assert result.code == PASSED, result.out + result.err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mistake"), runpy.run_path(
    f"{FOLDERS[9]}/solution.py")["TRAININGS"].items())
def test_answers_of_exercise_9_are_verdicts_of_agree(name, mistake):
    script = FOLDERS[9] / "trainings.py"
    arguments = [ROOT / "agree" / "agree" / "__main__.py", "--steps", 1000, script, name]
    variables = environment() | {"PYTHONPATH": str(ROOT / "agree")}
    result = forked.run(arguments, 2, variables, timeout=90)
    assert f"verdict: wrong: {mistake}\n" in result.out, result.out + result.err


@pytest.mark.parametrize("number", cases(NUMBERS, slow=[4, 8]))
def test_an_untouched_exercise_gets_a_hint(number, tmp_path):
    result = run_grader(number, (FOLDERS[number] / "exercise.py").read_text(), tmp_path)
    assert result.code == FAILED and "hint: " in result.out
    assert "Traceback" not in result.out + result.err


@pytest.mark.parametrize(("number", "name"), cases(WRONG, slow=[1, 2, 3, 4, 6, 8, 11]))
def test_each_mistake_gets_its_hint(number, name, tmp_path):
    changes, hint = WRONG[number, name]
    text = solution(number, tmp_path)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    result = run_grader(number, text, tmp_path)
    assert result.code == FAILED, result.out + result.err
    assert hint in result.out.split("hint: ")[-1], result.out
    assert result.out.count("hint: ") == 1 and "Traceback" not in result.out + result.err
