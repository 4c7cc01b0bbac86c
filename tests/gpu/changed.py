"""Change one thing in PyTorch, then run a chapter: `python changed.py CHANGE MAIN FLAG...`.

CHANGE: "own gradients", a mistake, or what happens to rank 1: "raises", "is killed", "is stopped".
"""

import itertools
import os
import runpy
import signal
import sys
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer

_, change, *sys.argv = sys.argv
steps = itertools.count(1)


def call_model(ddp, images):
    return ddp.module(images)


def fail_after_step_5(*_):
    if os.environ["RANK"] == "1" and next(steps) == 5:
        Path("failure").touch()
        if change == "raises":
            raise ValueError("on purpose")
        os.kill(os.getpid(), signal.SIGKILL if change == "is killed" else signal.SIGSTOP)


if change == "own gradients":
    DistributedDataParallel.__call__ = call_model
else:
    optimizer.register_optimizer_step_post_hook(fail_after_step_5)
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
