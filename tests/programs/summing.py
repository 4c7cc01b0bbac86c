"""Run a program where FSDP adds up gradients and does not average them: `python summing.py MAIN FLAG...`."""

import runpy
import sys
from pathlib import Path

import torch.distributed as dist


def summed(original=dist.reduce_scatter_single, **options):
    done = original(**options)
    options["output"].mul_(dist.get_world_size())
    return done


dist.reduce_scatter_single = summed
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
