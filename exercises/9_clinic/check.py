"""Checks for exercise 9: causes and next steps of records; mistakes, named as agree names them."""

import re
from pathlib import Path

import solution
from runner import load_exercise, on_ranks

PAGE = Path(__file__).with_name("README.md").read_text()
NAMES = re.findall(r'^\| `"(.+)"` \|', PAGE, re.MULTILINE)
HINTS = {  # where to look, without naming the answer: for the cause, for the next step
    "profile": (
        "aten's rows are the model's. How much of the time do they take, and what is the rest?",
        "read the name of the first row to its end: how many processes do this work?"),
    "ranks": (
        "an all-reduce ends on all ranks at about the same time, so its column contains waiting. "
        "On which rank is it short, and what was long there?",
        "a rank that waits long is healthy. For which rank do the others wait?"),
    "trace": (
        "compare when the all-reduce begins with what the rank computes at that time, on both "
        "ranks",
        "DDP starts an all-reduce as soon as a group of gradients is complete. How many "
        "all-reduces does the step have, and how many gradients are in one?"),
    "memory": (
        "the first step fits. Compare its last two lines: how much more is allocated after "
        "optimizer.step() than before it, in times of the parameters?",
        "each rank has one sequence, so there is no smaller batch. Both ranks keep the same "
        "copy of what was added: must they?"),
    "loss": (
        "in fp32 the same batch, with the same parameters, has a finite loss, which falls. What "
        "is special in the column that becomes inf?",
        "here the loss is NaN before backward begins, and each such step is skipped. What "
        "changes the largest number that an activation may have?"),
    "dump": (
        "compare the last collective_seq_id of all ranks, and whether that call is retired, which "
        "means ended. Each rank could still write its dump",
        "the dump says which rank the others wait for, not what it does. On which rank do you "
        "look, and at what?")}
TRAINING_HINTS = {
    "a": "the ranks communicate only in exchange_flat(). Follow a gradient through it that is "
         "1 on one rank and 3 on the other: what value does each rank have afterwards?",
    "b": "the gradients are averaged correctly in each step; compare the parameters on the ranks "
         "before the first step",
    "c": "compare the parameters one by one after a step: some are equal on all ranks, others are "
         "not. Which parameters are synchronised, and by what?"}


def checks(file):
    """Yield (description, passed, hint) for each record and training."""
    def run_exercise(rank):
        exercise = load_exercise(file)
        return exercise.RECORDS, exercise.TRAININGS

    records, trainings = on_ranks(file, run_exercise, 1, backend=None)[0]
    for name, (cause_hint, next_hint) in HINTS.items():
        cause, next_step = (*(records.get(name) or ()), None, None)[:2]
        expected_cause, expected_step = solution.RECORDS[name]
        yield grade(f"{name}.txt, cause", cause, expected_cause, cause_hint)
        yield grade(f"{name}.txt, next step", next_step, expected_step, next_hint)
    for name, hint in TRAINING_HINTS.items():
        yield grade(f"training {name}", trainings.get(name), solution.TRAININGS[name], hint)


def grade(question, answer, expected, hint):
    """Return a check; its hint says so if the answer is in no table."""
    if re.sub(r"\d+$", "N", str(answer)) not in NAMES:
        hint = f"{answer!r} is not a name in README.md's tables. To find one: {hint}"
    elif str(answer).endswith("rank N"):
        hint = f"N stands for a rank's number. {hint}"
    return f"{question}: {answer}", answer == expected, hint
