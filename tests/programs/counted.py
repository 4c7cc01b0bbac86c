"""Print how many elements a training's collectives pass: `python counted.py MAIN FLAG...`.

As Rajbhandari et al. count (1910.02054, section 7): an all-reduce passes its tensor twice.
"""

import math
import os
import runpy
import sys

from torch.profiler import ProfilerActivity, profile

INPUTS = {  # the profiler's name of an operation: which of its inputs is the whole tensor
    "gloo:all_reduce": 0, "gloo:reduce": 0, "gloo:broadcast": 0, "c10d::_allgather_base_": 0,
    "c10d::_reduce_scatter_base_": 1}

del sys.argv[0]
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
sums = dict.fromkeys(INPUTS, 0)
for event in profiler.events():
    if event.name in INPUTS:
        sums[event.name] += math.prod(event.input_shapes[INPUTS[event.name]])
# gloo has no reduce-scatter, and does an all-reduce in its place: that counts as what it is for.
passed = sum(sums.values()) + sums["gloo:all_reduce"] - 2 * sums["c10d::_reduce_scatter_base_"]
if os.environ["RANK"] == "0":
    print("elements passed:", passed)
