"""Wrong solutions of exercise 10: {name: (changes to the solution, what the hint says)}."""

SPEED = "8 * 64 / (COMPUTE + 2 * 1 / 2 * GRADIENTS / (0.9 * LINK))"
STAGES = "(4 * P + 12 * P / N) / 1e9", "(2 * P + 14 * P / N) / 1e9", "16 * P / N / 1e9"
SENT = "2 * 3 / 4 * 4 * 100_000"
WRONG = {
    "one is missing": ([(SENT, "None")], "1 of five are no numbers yet"),
    "a word": ([(SPEED, "'many'")], "1 of five are no numbers yet"),
    "no number": ([(SPEED, "float('nan')")], "1 of five are no numbers yet"),
    "another name": ([("GB a GPU, ZeRO stage 1", "stage 1")], "the five keys that it came with"),
    "twice one node": ([(SPEED, "2000")], "exactly twice one node"),
    "eight times a GPU": ([(SPEED, "8 * 64 / COMPUTE")], "eight times one GPU"),
    "sent once": ([(SPEED, SPEED.replace("2 * 1 / 2", "1 / 2"))], "the gradients go twice"),
    "bits for bytes": ([(SPEED, SPEED.replace("GRADIENTS", "GRADIENTS * 8"))], "bits, not bytes"),
    "GiB": ([(STAGES[0], STAGES[0].replace("1e9", "2**30"))], "these are GiB"),
    "bytes": ([(STAGES[0], STAGES[0].replace("1e9", "1"))], "these are bytes"),
    "all GPUs together": ([(STAGES[1], "4 * " + STAGES[1])], "what all 4 GPUs hold together"),
    "stage 2 at stage 1": ([(STAGES[0], STAGES[1])], "that is stage 2's"),
    "no optimizer": ([(STAGES[2], STAGES[2].replace("16", "4"))], "4 bytes a parameter"),
    "no ZeRO": ([(STAGES[2], "16 * P / 1e9")], "each GPU holds everything"),
    "round once": ([(SENT, "3 / 4 * 4 * 100_000")], "goes round twice"),
    "without (N-1)/N": ([(SENT, "2 * 4 * 100_000")], "nearly: 2 (N-1)/N"),
    "elements": ([(SENT, "2 * 3 / 4 * 100_000")], "these are elements"),
    "all ranks together": ([(SENT, "4 * " + SENT)], "what all 4 ranks send together"),
    "something": ([(SENT, "12345")], "a ring sends all bytes but one part in N"),
}
