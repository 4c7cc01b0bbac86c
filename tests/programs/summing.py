"""Run a program whose FSDP sums gradients, not averages them: `python summing.py MAIN FLAG...`."""

import runpy
import sys

import torch.distributed as dist


def summed(original=dist.reduce_scatter_single, **options):
    done = original(**options)
    options["output"].mul_(dist.get_world_size())
    return done


dist.reduce_scatter_single = summed
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
