"""Change one thing in PyTorch, then run a chapter: `python changed.py CHANGE MAIN FLAG...`.

CHANGE: a mistake, or what happens to rank 1, as named below. "no problems" changes nothing.
"""

import itertools
import os
import runpy
import signal
import sys
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.utils.data import DistributedSampler

_, change, *sys.argv = sys.argv
rank = int(os.environ["RANK"])
steps = itertools.count(1)
init_ddp, init_sampler = DistributedDataParallel.__init__, DistributedSampler.__init__


def call_model(ddp, images):
    return ddp.module(images)


def give_all_images(sampler, images, world_size, rank, **options):
    init_sampler(sampler, images, 1, 0, **options)


def change_rate(sgd, arguments, options):
    sgd.param_groups[0]["lr"] *= 1 + rank


def compile_first(ddp, model):
    model.compile()
    init_ddp(ddp, model)


def fail_after_step_5(sgd, arguments, options):
    if rank == 1 and next(steps) == 5:
        Path("failure").touch()
        if change == "raises":
            raise ValueError("on purpose")
        os.kill(os.getpid(), signal.SIGKILL if change == "is killed" else signal.SIGSTOP)


if change == "own gradients":
    DistributedDataParallel.__call__ = call_model
elif change == "sampler":
    DistributedSampler.__init__ = give_all_images
elif change == "apart":
    optimizer.register_optimizer_step_pre_hook(change_rate)
elif change == "compiled":
    DistributedDataParallel.__init__ = compile_first
elif change in ("raises", "is killed", "is stopped"):
    optimizer.register_optimizer_step_post_hook(fail_after_step_5)
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
