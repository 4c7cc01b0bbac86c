"""Plan, then run: a solution."""

from workshop.gpus import read_gpus

COMPUTE_SECONDS, GRADIENT_BYTES, BANDWIDTH = 0.25, 100e6, 0.9 * 1.25e9  # usable bytes/s
PARAMETERS, GPUS = 1.5e9, 4
PEAK = read_gpus()["h100"].peak  # FLOP/s
GPT_PARAMETERS, GPT_TOKENS, GPU_TOKENS_PER_SECOND = 7e9, 4e6, 9000
NODE_LINK = 400e9  # bytes/s

PLAN = {
    # Each of n = 2 nodes sends 2 (n-1)/n of the gradients.
    "images/s on 2 nodes": 8 * 64 / (COMPUTE_SECONDS + 2 * 1 / 2 * GRADIENT_BYTES / BANDWIDTH),
    "GB per GPU, ZeRO stage 1": PARAMETERS * (4 + 12 / GPUS) / 1e9,
    "GB per GPU, ZeRO stage 2": PARAMETERS * (2 + 14 / GPUS) / 1e9,
    "GB per GPU, ZeRO stage 3": PARAMETERS * 16 / GPUS / 1e9,
    "bytes sent per rank per DDP step": 2 * 3 / 4 * 4 * 100_000,
    "FLOPs of a step": 6 * GPT_PARAMETERS * GPT_TOKENS,
    "MFU in percent": 100 * 6 * GPT_PARAMETERS * GPU_TOKENS_PER_SECOND / PEAK,
    # With P parameters the link needs (2 + 2 + 4) P / NODE_LINK seconds, and a GPU
    # 6 P tokens / (0.4 PEAK). They are equal at this number of tokens, for any P:
    "tokens per GPU and micro-batch": (2 + 2 + 4) * 0.4 * PEAK / (6 * NODE_LINK),
}
