"""Whose fault is it? A solution."""

ANSWERS = {
    "a": "sum",  # nobody divides by the number of ranks
    "b": "own gradients",  # step() calls self.model, not self.ddp
    "c": "order",  # nobody calls set_epoch
    "d": "same data",  # shuffle=True with one seed, and no sampler
    "e": "weights",  # the seed differs when the model is made, and nobody broadcasts it
    "f": "part",  # the wrapper knows the body, not the head
}
