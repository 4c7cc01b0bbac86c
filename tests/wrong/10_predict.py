"""Wrong solutions of exercise 10: {name: (changes to the solution, what the hint says)}."""

SPEED = "8 * 64 / (COMPUTE + 2 * 1 / 2 * GRADIENTS / (0.9 * LINK))"
STAGES = "(4 * P + 12 * P / N) / 1e9", "(2 * P + 14 * P / N) / 1e9", "16 * P / N / 1e9"
SENT = "2 * 3 / 4 * 4 * 100_000"
WRONG = {
    "one is missing": ([(SENT, "None")], "1 of five are no numbers yet"),
    "sent once": ([(SPEED, SPEED.replace("2 * 1 / 2", "1 / 2"))], "the gradients go twice"),
    "bits for bytes": ([(SPEED, SPEED.replace("GRADIENTS", "GRADIENTS * 8"))], "bits, not bytes"),
    "GiB": ([(STAGES[0], STAGES[0].replace("1e9", "2**30"))], "these are GiB"),
    "stage 2 at stage 1": ([(STAGES[0], STAGES[1])], "that is stage 2's"),
    "round once": ([(SENT, "3 / 4 * 4 * 100_000")], "goes round twice"),
    "without (N-1)/N": ([(SENT, "2 * 4 * 100_000")], "nearly: 2 (N-1)/N"),
}
