"""Predict, then run: a solution."""

COMPUTE_SECONDS, GRADIENT_BYTES, BANDWIDTH = 0.25, 100e6, 0.9 * 1.25e9  # usable bytes/s
PARAMETERS, GPUS = 1.5e9, 4

PREDICTION = {
    # Each of n = 2 nodes sends 2 (n-1)/n of the gradients.
    "images/s on 2 nodes": 8 * 64 / (COMPUTE_SECONDS + 2 * 1 / 2 * GRADIENT_BYTES / BANDWIDTH),
    "GB per GPU, ZeRO stage 1": PARAMETERS * (4 + 12 / GPUS) / 1e9,
    "GB per GPU, ZeRO stage 2": PARAMETERS * (2 + 14 / GPUS) / 1e9,
    "GB per GPU, ZeRO stage 3": PARAMETERS * 16 / GPUS / 1e9,
    "bytes sent per rank per DDP step": 2 * 3 / 4 * 4 * 100_000,
}
