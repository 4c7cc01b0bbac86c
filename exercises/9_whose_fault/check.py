"""What the grade of exercise 9 looks at: agree.py's findings in the six scripts, and the learner's names for them."""

import tempfile
from pathlib import Path

import sklearn.datasets  # noqa: F401  once, before the ranks are forked
from runner import PRINTED, NotRun, learner, on_ranks
from scripts import agree_verdicts, findings, run_script, torchruns_variables

RANKS = 2
NAMES = ("weights", "own gradients", "one rank's", "sum", "twice", "part", "same data", "overlap", "order", "sampler")
SYMPTOMS = {  # where to look, and what one sees there; no names
    "a": "exchange() is all that the ranks do together in a step. Take one number in it, 1 on the one rank and 3 "
         "on the other, "
         "and follow it through: what has each in the end?",
    "b": "look where forward and backward are called, in step(): after it the ranks' parameters differ",
    "c": "gradients and parameters are what they have to be on all ranks. Look at what the loader deals out in "
         "the second epoch",
    "d": "gradients and parameters are what they have to be. Which images does rank 1 have in its first batch, "
         "and which rank 0?",
    "e": "the gradients are averaged, rightly, in each step; look at what they are added to, before the first one",
    "f": "look at parameters one by one after a step: some are equal on all ranks, others are not. Who tells "
         "whom about which?",
}


def watch(file):
    """The learner's answers, and what agree.py finds wrong in each script, without what follows from something else."""
    answers, = on_ranks(file, lambda _: getattr(learner(file), "ANSWERS", None), 1, meet=False)
    if not isinstance(answers, dict) or answers.keys() != SYMPTOMS.keys():
        raise NotRun('ANSWERS has to be a dict with the keys "a" to "f"')
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in answers:
            script = Path(__file__).with_name("scripts") / f"{name}.py"
            places, store = torchruns_variables(RANKS)
            try:
                facts = run_script(script, places, [folder] * RANKS)
            except NotRun as problem:
                raise NotRun(f"{problem}; as it came, {name}.py runs to its end: git checkout it") from None
            found[name] = [key for key in findings(facts) if key in NAMES]
            del store
    PRINTED.clear()  # the scripts' losses are no news
    return {"answers": answers, "found": found}


def points(facts):
    """(what, whether it is right, the hint if not), script by script."""
    for name, answer in facts["answers"].items():
        found = facts["found"][name]
        hint = f"write one of these in quotes: {', '.join(NAMES)}"
        if answer in NAMES:
            hint = SYMPTOMS[name] + f'\n      ("{answer}" would be: {agree_verdicts.FINDINGS[answer][0]})'
        if len(found) != 1:
            hint = f"{name}.py has been changed, and has {len(found)} of these mistakes now: git checkout it"
        yield f"{name}.py: {answer}", found == [answer], hint
