"""Wrong solutions of exercise 7: {name: (changes to the solution, what the hint says)}."""

WARM_UP = "min(stages - stage - 1, micro_batches)"
LAST = "range(micro_batches - warm_up, micro_batches)"
WRONG = {
    "the last backwards forgotten": (
        [(LAST, "range(0)")],
        "('F', 7), ('B', 4)], but must run F and B"),
    "fewer micro-batches than stages": ([(WARM_UP, "stages - stage - 1")], "('F', 2), ('B', -1)"),
    "the newest first": ([("number - warm_up", "number"), (LAST, "range(warm_up)")],
                         "slots: run the oldest backward first"),
    "the other way round": (
        [(WARM_UP, "min(stage, micro_batches)")],
        "deadlock after 4 slots: stage 0 waits at B0, stage 1 waits at F1"),
    "GPipe": (
        [(WARM_UP, "micro_batches")],
        "store up to [8, 8, 8, 8] micro-batches' activations, but [4, 3, 2, 1] are enough"),
    "one too few at the start": (
        [(WARM_UP, "max(0, min(stages - stage - 2, micro_batches))")],
        "it takes 36 slots"),
}
