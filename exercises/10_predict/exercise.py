"""Predict, then run.

Replace each None with a number; README.md says what each is. Nothing is computed or shown before
all five are there.
"""

PREDICTION = {
    "images/s on 2 nodes": None,
    "GB per GPU, ZeRO stage 1": None,
    "GB per GPU, ZeRO stage 2": None,
    "GB per GPU, ZeRO stage 3": None,
    "bytes sent per rank per DDP step": None,
}
