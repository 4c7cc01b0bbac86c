"""Choose the layout: a solution, with the three cases that SEED 0 draws."""

from workshop.gpus import read_gpus


def computed(gpu, layers, width, stages=1):
    """Return the parameters, and the seconds per token of a GPU that computes the last stage."""
    blocks, output = 12 * layers * width**2, 50_000 * width
    rate = gpu.peak * gpu.matmul_share / (1 + 1500 / width)
    return blocks + 2 * output, 6 * (blocks / stages + output) / rate


# Case 1: 1.4 billion parameters, of 20 bytes, fit; and each GPU has only one sequence, of 4,096.
mi300x = read_gpus()["mi300x"]
parameters, token = computed(mi300x, 24, 2048)
computation, all_reduce = 4096 * token, 8 * parameters / (0.9 * mi300x.node_link)
exposed = max(all_reduce - 2 / 3 * computation, 0.37 * all_reduce)
ddp = computation + exposed + 24 * parameters / mi300x.memory_rate

# Case 2: 13 billion do not fit, and four sequences of 2,048 per GPU are enough for FSDP.
h200 = read_gpus()["h200"]
parameters, token = computed(h200, 40, 5120)
computation = 4 * 2048 * token
sending = 8 * parameters / (0.5 * h200.node_link) + 36e-6 * 40 * 32
exposed = max(sending - computation, 0) + 0.37 * min(sending, computation)
fsdp = computation + exposed + 24 * parameters / 32 / h200.memory_rate

# Case 3: 512 GPUs and 128 sequences. A node shares the tensors, 8 nodes are a pipeline; 8 of these.
h100 = read_gpus()["h100"]
parameters, token = computed(h100, 64, 8192, stages=8)
messages = 4 * 64 / 8 * (2 * 7 / 8 * 2 * 4096 * 8192 / (0.5 * h100.gpu_link) + 24e-6 * 7)
micro_batch = 4096 * token / 8 + messages
at_end = 6 * parameters / 8 / (0.9 * h100.node_link) + 24 * parameters / 512 / h100.memory_rate
pipeline = (128 / 8 + 8 - 1) * micro_batch + at_end

SEED = 0
LAYOUTS = [  # data, shard, tensor, pipeline, micro_batch, recompute, seconds
    (128, 1, 1, 1, 1, False, ddp),
    (32, 32, 1, 1, 4, False, fsdp),
    (8, 8, 8, 8, 1, False, pipeline),
]
