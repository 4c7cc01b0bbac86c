"""The clinic: a solution."""

RECORDS = {
    "profile": ("input", "workers"),  # preparing the batches takes nine tenths of the time
    "ranks": ("slow rank", "node of rank 2"),  # it computes longest, and waits least
    "trace": ("no overlap", "smaller buckets"),  # all 8,396,800 gradients are in one
    "memory": ("optimizer state", "ZeRO"),  # the first step adds twice the parameters
    "loss": ("fp16 range", "bf16"),  # scaling, which is on, does not change activations
    "dump": ("absent rank", "stack of rank 2"),  # the others have made call 36
}
TRAININGS = {
    "a": "sum",  # the sum is not divided by the number of ranks
    "b": "weights",  # each rank builds the model with its own seed, and there is no broadcast
    "c": "part",  # the body is wrapped, the head is not
}
