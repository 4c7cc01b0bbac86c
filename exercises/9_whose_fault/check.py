"""What the grade of exercise 9 looks at: agree.py's verdicts on the six scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

from runner import NotRun, learner, on_ranks

HERE = Path(__file__).resolve().parent
AGREE = HERE.parents[1] / "submit" / "agree.py"
NAMES = ("weights", "own gradients", "one rank's", "sum", "twice", "part", "same data", "overlap",
         "order", "sampler")
SYMPTOMS = {  # where to look, and what one sees there; no names
    "a": "exchange() is all that the ranks do together in a step. Take one number in it, 1 on the "
         "one rank and 3 on the other, and follow it through: what has each in the end?",
    "b": "look where forward and backward are called, in step(): after it the ranks' parameters "
         "differ",
    "c": "gradients and parameters are what they have to be on all ranks. Look at what the loader "
         "deals out in the second epoch",
    "d": "gradients and parameters are what they have to be. Which images does rank 1 have in its "
         "first batch, and which rank 0?",
    "e": "the gradients are averaged, rightly, in each step; look at what they are added to, "
         "before the first one",
    "f": "look at parameters one by one after a step: some are equal on all ranks, others are "
         "not. Who tells whom about which?",
}


def points(file):
    """Yield (what, whether it is right, the hint if not), script by script."""
    answers, = on_ranks(file, lambda _: getattr(learner(file), "ANSWERS", None), 1, meet=False)
    if not isinstance(answers, dict) or answers.keys() != SYMPTOMS.keys():
        raise NotRun('ANSWERS has to be a dict with the keys "a" to "f"')
    for name, answer in answers.items():
        if answer not in NAMES:
            yield f"{name}.py: {answer}", False, (
                f"write one of these in quotes: {', '.join(NAMES)}")
            return
        verdict = verdict_of(HERE / "scripts" / f"{name}.py")
        if verdict not in NAMES:
            raise NotRun(f"{name}.py has been changed, and its mistake is another now: "
                         "git checkout it")
        yield f"{name}.py: {answer}", verdict == answer, SYMPTOMS[name]


def verdict_of(script):
    """Return what agree.py finds wrong with a script, from its first step to its last."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, AGREE, "--steps", "1000", script], stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return "".join(re.findall("^verdict: wrong: (.*)", done.stdout, re.M))
