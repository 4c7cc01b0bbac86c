"""Whose fault is it? A solution."""

ANSWERS = {
    "a": "sum",  # the sum is not divided by the number of ranks
    "b": "weights",  # each rank builds the model with its own seed, and there is no broadcast
    "c": "part",  # the body is wrapped, the head is not
}
