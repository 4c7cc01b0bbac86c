"""Choose the layout.

Replace None by a whole number in SEED, such as your birthday. Then the grader prints three cases.
Write a layout of each, and its seconds per step, into LAYOUTS, as README.md describes.
"""

SEED = None
LAYOUTS = [  # data, shard, tensor, pipeline, micro_batch, recompute, seconds
    (1, 1, 1, 1, 1, False, None),
    (1, 1, 1, 1, 1, False, None),
    (1, 1, 1, 1, 1, False, None),
]
