"""Wrong solutions of exercise 10: {name: (changes to the solution, what the hint says)}."""

SPEED = "8 * 64 / (COMPUTE + 2 * 1 / 2 * GRADIENTS / (0.9 * LINK))"
STAGES = "(4 * P + 12 * P / N) / 1e9", "(2 * P + 14 * P / N) / 1e9", "16 * P / N / 1e9"
SENT = "2 * 3 / 4 * 4 * 100_000"
WRONG = {
    "one is missing": ([(SENT, "None")], "1 of the 5 values are not numbers"),
    "sent once": ([(SPEED, SPEED.replace("2 * 1 / 2", "1 / 2"))],
        "1.15 times the formula's: a step takes"),
    "GiB": ([(STAGES[0], STAGES[0].replace("1e9", "2**30"))], "A GB is 10**9 bytes"),
    "stage 2 at stage 1": (
        [(STAGES[0], STAGES[1])],
        "which of 2, 2, 4 and 8 does this stage divide"),
    "round once": (
        [(SENT, "3 / 4 * 4 * 100_000")],
        "0.5 times the formula's: a ring sends (N-1)/N of the bytes, twice"),
}
