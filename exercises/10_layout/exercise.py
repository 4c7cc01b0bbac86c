"""Choose the layout.

Replace each None, as README.md describes. The grader shows nothing before all eight numbers of PLAN
are there. Then it draws three cases by SEED, for LAYOUTS.
"""

PLAN = {
    "images/s on 2 nodes": None,
    "GB per GPU, ZeRO stage 1": None,
    "GB per GPU, ZeRO stage 2": None,
    "GB per GPU, ZeRO stage 3": None,
    "bytes sent per rank per DDP step": None,
    "FLOPs of a step": None,
    "MFU in percent": None,
    "tokens per GPU and micro-batch": None,
}

SEED = None  # any whole number, such as your birthday
LAYOUTS = [  # data, shard, tensor, pipeline, micro_batch, recompute, seconds
    (None, None, None, None, None, False, None),
    (None, None, None, None, None, False, None),
    (None, None, None, None, None, False, None),
]
