"""Checks for exercise 9: mistakes, named as agree names them."""

import solution
from runner import load_exercise, on_ranks

HINTS = {  # where to look, without naming the mistake
    "a": "the ranks communicate only in exchange(). Follow a gradient through it that is 1 on one "
         "rank and 3 on the other: what value does each rank have afterwards?",
    "b": "the gradients are averaged correctly in each step; compare the parameters on the ranks "
         "before the first step",
    "c": "compare the parameters one by one after a step: some are equal on all ranks, others are "
         "not. Which parameters are synchronised, and by what?",
}


def checks(file):
    """Yield (description, passed, hint) for each script."""
    answers = on_ranks(file, lambda rank: load_exercise(file).ANSWERS, 1, backend=None)[0]
    for name, hint in HINTS.items():
        answer = answers.get(name)
        yield f"{name}.py: {answer}", answer == solution.ANSWERS[name], hint
