"""What the grade of exercise 9 looks at: agree.py's findings in the six scripts, and the learner's names for them."""

import contextlib
import io
from pathlib import Path

from runner import NotRun, learner, on_ranks
from scripts import by_torchrun, findings

NAMES = ("weights", "own gradients", "one rank's", "sum", "twice", "part", "same data", "overlap", "order", "sampler")
SYMPTOMS = {  # where to look, and what one sees there; no names
    "a": "exchange() is all that the ranks do together in a step. Take one number in it, 1 on the one rank and 3 "
         "on the other, and follow it through: what has each in the end?",
    "b": "look where forward and backward are called, in step(): after it the ranks' parameters differ",
    "c": "gradients and parameters are what they have to be on all ranks. Look at what the loader deals out in "
         "the second epoch",
    "d": "gradients and parameters are what they have to be. Which images does rank 1 have in its first batch, "
         "and which rank 0?",
    "e": "the gradients are averaged, rightly, in each step; look at what they are added to, before the first one",
    "f": "look at parameters one by one after a step: some are equal on all ranks, others are not. Who tells "
         "whom about which?",
}


def points(file):
    """(what, whether it is right, the hint if not), script by script."""
    answers, = on_ranks(file, lambda _: getattr(learner(file), "ANSWERS", None), 1, meet=False)
    if not isinstance(answers, dict) or answers.keys() != SYMPTOMS.keys():
        raise NotRun('ANSWERS has to be a dict with the keys "a" to "f"')
    for name, answer in answers.items():
        changed = f"{name}.py has been changed, and its mistake is another now: git checkout it"
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the script's losses are no news
                facts = by_torchrun(Path(__file__).with_name("scripts") / f"{name}.py", 2)
        except NotRun:
            raise NotRun(changed) from None
        found = [key for key in findings(facts) if key in NAMES]
        hint = SYMPTOMS[name] if answer in NAMES else f"write one of these in quotes: {', '.join(NAMES)}"
        yield f"{name}.py: {answer}", found == [answer], hint if len(found) == 1 else changed
