"""Whose fault is it? A solution."""

ANSWERS = {
    "a": "sum",  # nobody divides by the number of ranks
    "b": "same data",  # shuffle=True with one seed, and no sampler
    "c": "weights",  # the seed differs when the model is made, and nobody broadcasts it
    "d": "part",  # the wrapper knows the body, not the head
}
