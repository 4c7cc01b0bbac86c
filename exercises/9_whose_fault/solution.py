"""Whose fault is it? A solution."""

ANSWERS = {
    "a": "sum",  # nobody divides by the number of ranks
    "b": "weights",  # the seed differs when the model is made, and nobody broadcasts it
    "c": "part",  # the wrapper knows the body, not the head
}
