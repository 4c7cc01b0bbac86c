"""Wrong solutions of exercise 10: {name: (changes to the solution, what the hint says)}."""

SPEED = "8 * 64 / (COMPUTE_SECONDS + 2 * 1 / 2 * GRADIENT_BYTES / BANDWIDTH)"
STAGE_1, STAGE_2 = "PARAMETERS * (4 + 12 / GPUS) / 1e9", "PARAMETERS * (2 + 14 / GPUS) / 1e9"
TRAFFIC = "2 * 3 / 4 * 4 * 100_000"
WRONG = {
    "one is missing": ([(TRAFFIC, "None")], "1 of the 5 values are not numbers"),
    "sent once": ([(SPEED, SPEED.replace("2 * 1 / 2", "1 / 2"))],
        "1.15 times the computed one: a step takes"),
    "GiB": ([(STAGE_1, STAGE_1.replace("1e9", "2**30"))], "A GB is 10**9 bytes"),
    "stage 2 at stage 1": (
        [(STAGE_1, STAGE_2)],
        "which of 2, 2, 4 and 8 does this stage divide"),
    "round once": (
        [(TRAFFIC, "3 / 4 * 4 * 100_000")],
        "0.5 times the computed one: a ring sends (N-1)/N of the bytes, twice"),
}
