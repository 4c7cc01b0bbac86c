"""Wrong solutions of exercise 7: {name: (changes to the solution, what the hint says)}."""

WARM_UP = "min(stages - stage - 1, micro_batches)"
BACK = '        order.append(("B", number - warm_up))\n'
LAST = "range(micro_batches - warm_up, micro_batches)"
FORTH = '        order.append(("F", number))\n'
PAIR, FIRST = FORTH + BACK, '("F", number) for number in range(warm_up)'
WRONG = {
    "nothing returned": ([("    return order\n", "")], "stage 0: not a list of pairs like ('F', 0), but None"),
    "lists in the place of pairs": ([("return order", "return [list(one) for one in order]")], "not a list of pairs"),
    "the last backwards forgotten": ([(LAST, "range(0)")], "stage 0 of 4, 8 micro-batches: B5 is in it 0 times"),
    "backwards of what is not there": ([("number - warm_up", "number"),
                                        (LAST, "range(micro_batches, micro_batches + warm_up)")],
                                       "B8 is in it, but there is no such pass"),
    "counted from 1": ([(FIRST, FIRST.replace("number)", "number + 1)")),
                        (FORTH, FORTH.replace("number)", "number + 1)"))],
                       "F8 is in it, but there is no such pass"),
    "fewer micro-batches than stages": ([(WARM_UP, "stages - stage - 1")],
                                        "stage 0 of 4, 2 micro-batches: F2 is in it"),
    "GPipe, backwards reversed": ([(WARM_UP, "micro_batches"), (LAST, f"reversed({LAST})")], "the oldest goes first"),
    "the newest first": ([("number - warm_up", "number"), (LAST, "range(warm_up)")],
                         "stage 0: the backwards are in the order 3, 4, 5, 6, 7, 0, 1, 2"),
    "a backward first": ([(PAIR, BACK + FORTH)], "stage 3: the backward of micro-batch 0 stands before its forward"),
    "the other way round": ([(WARM_UP, "min(stage, micro_batches)")],
                            "deadlock after 4 slots: B0 of stage 0 waits for B0 of stage 1, F1 of stage 1 waits"),
    "GPipe": ([(WARM_UP, "micro_batches")], "that is GPipe"),
    "one too many at the start": ([(WARM_UP, "min(stages - stage, micro_batches)")], "one forward too many"),
    "two too many at the start": ([(WARM_UP, "min(stages - stage + 1, micro_batches)")],
                                  "stage 0 holds 6, 4 - 0 = 4 are enough"),
    "the first stage's order for all": ([(WARM_UP, "min(stages - 1, micro_batches)")],
                                        "all stages have the same order"),
    "one too few at the start": ([(WARM_UP, "max(0, min(stages - stage - 2, micro_batches))")], "it takes 36 slots"),
    "the last stage's order for all": ([(WARM_UP, "0")], "it takes 64 slots"),
}
