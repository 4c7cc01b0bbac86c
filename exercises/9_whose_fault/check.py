"""What the grade of exercise 9 looks at: the names that agree.py has for the mistakes, too."""

import solution
from runner import learner, on_ranks

SYMPTOMS = {  # where to look, and what one sees there; no names
    "a": "exchange() is all that the ranks do together in a step. Take one number in it, 1 on the "
         "one rank and 3 on the other, and follow it through: what has each in the end?",
    "b": "the gradients are averaged, rightly, in each step; look at what they are added to, "
         "before the first one",
    "c": "look at parameters one by one after a step: some are equal on all ranks, others are "
         "not. Who tells whom about which?",
}


def points(file):
    """Yield (what, whether it is right, the hint if not), script by script."""
    answers, = on_ranks(file, lambda _: learner(file).ANSWERS, 1, meet=False)
    for name, hint in SYMPTOMS.items():
        answer = answers.get(name)
        yield f"{name}.py: {answer}", answer == solution.ANSWERS[name], hint
