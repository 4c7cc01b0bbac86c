"""The clinic: a solution."""

CAUSES = {
    "profile": "input",  # preparing batches takes 90 % of the time
    "ranks": "slow rank",  # rank 2 computes three times as long, and hardly waits
    "trace": "no overlap",  # the all-reduce begins when the last layer's backward has ended
    "memory": "optimizer state",  # the first step's end adds twice the parameters
    "loss": "fp16 range",  # an activation beyond 65,504 is inf, and inf - inf is NaN
    "dump": "absent rank",  # all but rank 2 have made call 36
}
NEXT_STEPS = {
    "profile": "workers",
    "ranks": "node of rank 2",
    "trace": "smaller buckets",  # DDP all-reduces all 8,396,800 gradients at once
    "memory": "ZeRO",
    "loss": "bf16",  # the scale, which is in use, changes gradients, not activations
    "dump": "stack of rank 2",
}
SCRIPTS = {
    "a": "sum",  # the sum is not divided by the number of ranks
    "b": "weights",  # each rank builds the model with its own seed, and there is no broadcast
    "c": "part",  # the body is wrapped, the head is not
}
