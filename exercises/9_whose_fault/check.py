"""Checks for exercise 9: mistakes, named as agree.py names them."""

import solution
from runner import load_exercise, on_ranks

SYMPTOMS = {  # where to look, without naming the mistake
    "a": "the ranks communicate only in exchange(). Follow one number through it, 1 on one rank "
         "and 3 on the other: what value does each rank end up with?",
    "b": "the gradients are averaged correctly in each step; compare the parameters on the ranks "
         "before the first step",
    "c": "compare the parameters one by one after a step: some are equal on all ranks, others are "
         "not. Which parameters are synchronised, and by what?",
}


def checks(file):
    """Yield (what, whether it is right, the hint if not), script by script."""
    answers, = on_ranks(file, lambda _: load_exercise(file).ANSWERS, 1, init_group=False)
    for name, hint in SYMPTOMS.items():
        answer = answers.get(name)
        yield f"{name}.py: {answer}", answer == solution.ANSWERS[name], hint
