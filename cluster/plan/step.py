"""How long a transformer's step takes on many GPUs: a model that is small enough to be read.

Times are in seconds, sizes in bytes, rates in bytes/s in one direction. Not modelled: reading data,
other jobs' traffic, mixtures of experts.
"""

import math
from dataclasses import dataclass

from cluster.plan.transformer import PYTORCH, Layout, Software, Transformer
from workshop.gpus import Gpu


@dataclass(frozen=True)
class Constants:
    """Constants of the model, the same for every prediction.

    Fitted to the rows of llm-foundry and BLOOM in published_llm.csv, unless assumed, together with
    the matmul_share of H100 and A100 in gpus.csv, by the sum of both projects' mean errors.
    """
    # Usable share of a link's nominal rate. Assumed: protocol and headers take the rest
    usable: float = 0.90
    # Attention's share of the rate of matrix products
    attention: float = 0.45
    # Bytes that all other kernels move, per token, block and element of the width
    other_bytes: float = 390
    # The same for each of a head's scores, where they are written to memory
    score_bytes: float = 99
    # Share of a link's rate that FSDP's and tensor parallelism's collectives reach, which are
    # many and take turns with computation. Assumed
    share: float = 0.5
    # Part of communication that is not hidden, even if computation takes longer
    exposed: float = 0.37
    # Latency per rank of a ring, in an all-gather or a reduce-scatter during computation
    ring_hop: float = 12e-6
    # Time of the other kernels after torch.compile; speed of float8 matrix products. Both assumed
    compiled: float = 0.5
    float8: float = 1.5


CENTRAL = Constants()


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs.

    node_link: rate of a node, all its network cards together; gpu_link: rate of a GPU to others of
    its node. measured: node_link was measured with an all-reduce (bus bandwidth), so shares of the
    rate do not apply to it.
    """
    nodes: int
    gpus: int
    node_link: float
    gpu_link: float
    measured: bool = False

    @property
    def ranks(self):
        return self.nodes * self.gpus

    def group_rate(self, size: int, stride: int, share: float) -> float:
        """Return bytes/s of one GPU in a collective of `size` GPUs, `stride` ranks apart.

        Several rings of a node share its link: a group with g of the node's GPUs gets g of them.
        """
        if size * stride <= self.gpus:
            return self.gpu_link * share
        link = self.node_link * (1 if self.measured else share)
        return min(self.gpu_link * share, link * max(1, self.gpus // stride) / self.gpus)


def make_cluster(gpus: int, per_node: int, node_link: float, gpu_link: float) -> Cluster:
    """Return the nodes that `gpus` GPUs fill; a single node may have fewer than `per_node`."""
    per_node = min(per_node, gpus)
    return Cluster(-(-gpus // per_node), per_node, node_link, gpu_link)


@dataclass(frozen=True)
class Step:
    """Seconds of a step, and where they go; `data` is hidden but for data_exposed."""
    seconds: float
    compute: float
    tensor: float
    data: float
    data_exposed: float
    bubble: float


RECOMPUTED = {  # share of forward's matrix products, attention and other kernels
    "none": (0, 0, 0), "operations": (0.25, 0, 1), "layers": (0.5, 0.5, 0.5), "full": (1, 1, 1)}


def exposed_seconds(sending: float, computing: float, constants: Constants = CENTRAL) -> float:
    """Return how long a GPU waits for what it sends while it computes."""
    return max(sending - computing, 0) + constants.exposed * min(sending, computing)


def slowest_stage(model: Transformer, stages: int) -> float:
    """Return the slowest pipeline stage's FLOPs of matrix products relative to the mean.

    The last stage has the output layer, too. If the blocks do not divide evenly, the first and the
    last stage have one less than the others.
    """
    block, head = 2 * model.block_parameters, 2 * model.embedding_parameters
    if stages == 1:
        return 1
    if model.layers % stages == 0:
        slowest = model.layers // stages * block + head
    else:
        blocks = math.ceil((model.layers + 2) / stages)
        slowest = max(blocks * block, (blocks - 1) * block + head)
    return slowest * stages / model.matmul_flops


def compute_seconds_of(model: Transformer, layout: Layout, gpu: Gpu, software: Software,
                       constants: Constants) -> float:
    """Return one GPU's seconds for a micro-batch, of the slowest pipeline stage.

    Matrix products and attention at a share of the peak, and other kernels at the memory's rate;
    backward has twice the matrix products of forward, 2.5 times its attention.
    """
    products, attention, others = RECOMPUTED[layout.checkpointing]
    products *= 1 - 2 * model.embedding_parameters / model.matmul_flops  # of the blocks only
    tokens = layout.micro_batch * model.context / layout.context / layout.pipeline
    rate = gpu.peak * gpu.matmul_share
    product_seconds = ((3 + products) * model.matmul_flops * slowest_stage(model, layout.pipeline)
                       / (rate * (constants.float8 if software.float8 else 1)))
    scores = 1 if software.flash else 2  # without it the masked half is computed, too
    attention_seconds = ((3.5 + attention) * scores * model.attention_flops
                         / (rate * constants.attention))
    moved = constants.other_bytes * model.layers * model.width
    replicated = 0 if software.flash else 10 / 34  # Korthikanti et al.: what tensors do not share
    moved *= 1 - replicated + replicated * layout.tensor
    if software.compiled:
        moved *= constants.compiled
    if not software.flash:
        moved += constants.score_bytes * model.layers * model.heads * model.context
    other_seconds = (3 + others) / 3 * moved / gpu.memory_rate
    return tokens / layout.tensor * (product_seconds + attention_seconds + other_seconds)


def transformer_step(model: Transformer, layout: Layout, gpu: Gpu, cluster: Cluster,
                     software: Software = PYTORCH, constants: Constants = CENTRAL) -> Step:
    """Return the time of one optimizer step.

    Tensor parallelism: 4 all-reduces of a micro-batch's activations per block, 6 with full
    checkpointing, exposed. Context parallelism: keys and values travel three times. FSDP: two
    all-gathers of bf16 and a reduce-scatter per micro-batch, once per step in a pipeline. DDP: an
    all-reduce of the gradients per step, ZeRO-1: a reduce-scatter and an all-gather of bf16,
    during the last backward, but after a pipeline.
    """
    compute = compute_seconds_of(model, layout, gpu, software, constants)
    tokens = layout.micro_batch * model.context / layout.context
    blocks = model.layers / layout.pipeline
    tensor = 0.0
    if layout.tensor > 1:
        calls = blocks * (6 if layout.checkpointing == "full" else 4)
        sent = calls * 2 * (layout.tensor - 1) / layout.tensor * tokens * model.width * 2
        tensor = (sent / cluster.group_rate(layout.tensor, 1, constants.share)
                  + calls * 2 * constants.ring_hop * (layout.tensor - 1))
        tensor *= 0.5 if software.overlap else 1
    if layout.context > 1:
        sent = (3 * (layout.context - 1) / layout.context * tokens * 2 * 2 * model.width
                * model.kv_share * blocks / layout.tensor)
        tensor += sent / cluster.group_rate(layout.context, layout.tensor, constants.share)
    if layout.pipeline > 1:  # activations to the next stage, their gradients back
        rate = cluster.group_rate(2, layout.gpus // layout.pipeline, constants.usable)
        tensor += 2 * tokens * model.width * 2 / layout.tensor / rate
    micro_batch = compute + tensor

    shards = layout.data * layout.context // layout.replicas
    stride = layout.tensor
    parameters = model.parameters / layout.tensor / layout.pipeline
    data = 0.0
    if layout.zero >= 2 and shards > 1:
        gathers = 2 if layout.zero == 3 else 1
        sent = (2 * gathers + software.gradient_bytes) * parameters * (shards - 1) / shards
        data = (sent / cluster.group_rate(shards, stride, constants.share)
                + (gathers + 1) * blocks * constants.ring_hop * (shards - 1))
    across = layout.replicas if layout.zero >= 2 else layout.data
    reduced = 0.0
    if across > 1:
        kept, stride = (shards, stride * shards) if layout.zero >= 2 else (1, stride)
        sent = 2 + software.gradient_bytes if layout.zero == 1 else 2 * software.gradient_bytes
        reduced = ((across - 1) / across * sent * parameters / kept
                   / cluster.group_rate(across, stride, constants.usable))

    if layout.pipeline == 1:
        exposed = exposed_seconds(data, micro_batch, constants)
        micro_batch += exposed
        exposed *= layout.micro_batches
        data *= layout.micro_batches
        last_exposed = max(reduced - micro_batch * 2 / 3, constants.exposed * reduced)
    else:
        exposed, last_exposed = constants.exposed * data, reduced
    bubble = micro_batch * (layout.pipeline - 1) / layout.chunks
    state = parameters / (shards if layout.zero else 1)
    optimizer = 24 * state / gpu.memory_rate  # reads and writes of 3 x 4 bytes
    seconds = (layout.micro_batches * micro_batch + bubble + last_exposed + optimizer
               + (exposed if layout.pipeline > 1 else 0))
    return Step(seconds, layout.micro_batches * compute, layout.micro_batches * tensor,
                data + reduced, exposed + last_exposed, bubble)
