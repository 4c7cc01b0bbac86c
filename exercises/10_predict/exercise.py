"""Predict, then run.

Type in five numbers in place of None; README.md says what each is. Nothing is computed or shown
before all five are there.
"""

PREDICTION = {
    "images a second on 2 nodes": None,
    "GB a GPU, ZeRO stage 1": None,
    "GB a GPU, ZeRO stage 2": None,
    "GB a GPU, ZeRO stage 3": None,
    "bytes a rank sends in a step of DDP": None,
}
