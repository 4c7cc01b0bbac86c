"""Wrong solutions of exercise 7: {name: (changes to the solution, what the hint says)}."""

WARM_UP = "min(stages - stage - 1, micro_batches)"
LAST = "range(micro_batches - warm_up, micro_batches)"
WRONG = {
    "the last backwards forgotten": ([(LAST, "range(0)")], "stage 0 of 4, 8 micro-batches: B5 is in it 0 times"),
    "fewer micro-batches than stages": ([(WARM_UP, "stages - stage - 1")],
                                        "stage 0 of 4, 2 micro-batches: F2 is in it"),
    "the newest first": ([("number - warm_up", "number"), (LAST, "range(warm_up)")],
                         "stage 0: the backwards are in the order 3, 4, 5, 6, 7, 0, 1, 2"),
    "the other way round": ([(WARM_UP, "min(stage, micro_batches)")],
                            "deadlock after 4 slots: B0 of stage 0 waits for B0 of stage 1, F1 of stage 1 waits"),
    "GPipe": ([(WARM_UP, "micro_batches")], "that is GPipe"),
    "one too many at the start": ([(WARM_UP, "min(stages - stage, micro_batches)")], "one forward too many"),
    "one too few at the start": ([(WARM_UP, "max(0, min(stages - stage - 2, micro_batches))")], "it takes 36 slots"),
}
