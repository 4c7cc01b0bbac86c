"""Predict, then run: a solution."""

COMPUTE, GRADIENTS, LINK = 0.25, 100e6, 1.25e9  # s, bytes, bytes/s
P, N = 1.5e9, 4  # parameters, GPUs

PREDICTION = {
    # each node sends 2 (n-1)/n of the gradients, n = 2 nodes, at nine tenths of the link's rate
    "images/s on 2 nodes": 8 * 64 / (COMPUTE + 2 * 1 / 2 * GRADIENTS / (0.9 * LINK)),
    "GB per GPU, ZeRO stage 1": (4 * P + 12 * P / N) / 1e9,
    "GB per GPU, ZeRO stage 2": (2 * P + 14 * P / N) / 1e9,
    "GB per GPU, ZeRO stage 3": 16 * P / N / 1e9,
    "bytes sent per rank per DDP step": 2 * 3 / 4 * 4 * 100_000,
}
