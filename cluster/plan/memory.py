"""How many bytes of a GPU's memory a rank of a transformer's training needs at its peak.

python -m cluster.footprint counts a program's own bytes; here a formula has to do, for any layout.
"""

import math
from dataclasses import dataclass

from cluster.plan.transformer import PYTORCH, Layout, Software, Transformer
from workshop.gpus import Gpu

# Bytes per element of the output layer: bf16, fp32, its log-softmax in fp32, gradient in bf16
LOGIT_BYTES = 12
# What PyTorch's allocator reserves above what it has allocated: fragments, other streams
RESERVED = 1.05
# What nvidia-smi shows above that: CUDA's context, NCCL's buffers, other libraries. Fitted to
# BLOOM's rows in published_llm.csv, together with RESERVED
NVIDIA_SMI, CONTEXT = 1.15, 5 * 2**30
# One in ten of the judging runs needed more than the prediction by this share: plan --check
MEMORY_ERROR = 0.25


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at its peak. activations: of forward; work: what comes and goes."""
    state: float
    activations: float
    work: float

    @property
    def allocated(self) -> float:
        return self.state + self.activations + self.work

    @property
    def reserved(self) -> float:
        return self.allocated * RESERVED

    @property
    def in_use(self) -> float:
        """What nvidia-smi shows."""
        return self.reserved * NVIDIA_SMI + CONTEXT


def state_bytes(parameters: float, embedding: float, block: float, layout: Layout,
                software: Software) -> float:
    """Return the bytes of parameters, gradients and Adam, with the gathered ones of FSDP.

    FSDP keeps fp32 parameters, and gathers them in bf16. DDP: 4 + 4 + 8 bytes and 4 of its buckets,
    or, as Megatron-LM and DeepSpeed, also in a pipeline and with ZeRO-1, bf16 parameters and
    gradients, the gradients' fp32 sum, a master copy and two moments: 2 + 2 + 4 + 12.
    """
    shards = layout.data * layout.context // layout.replicas
    if layout.zero >= 2:
        state = 16 * parameters / shards
        if layout.pipeline > 1 or layout.zero == 2:  # gathered once per step, and kept
            gradients = software.gradient_bytes if layout.pipeline > 1 else 0
            return state + (2 + gradients) * parameters
        gathered = (2 + 2 + software.gradient_bytes) * block  # this block, the next, a gradient
        return state + gathered + (2 + software.gradient_bytes) * embedding
    gradients = 2 if software.gradient_bytes == 2 else 6  # bf16 and their fp32 sum
    return parameters * (2 + gradients + 12 / (layout.data if layout.zero else 1))


def rank_memory(model: Transformer, layout: Layout, software: Software = PYTORCH) -> Memory:
    """Return the memory of the rank that needs most.

    A pipeline's stage k, from 0, keeps stages - k micro-batches. The first one has the embedding,
    the last one the output layer; if the blocks do not divide evenly, both have a block less than
    the stages between.
    """
    stages, even = layout.pipeline, model.layers % layout.pipeline == 0
    embedding = model.embedding_parameters
    if stages == 1:
        return stage_memory(model, layout, software, model.layers,
                            embedding if model.tied else 2 * embedding, 1, True)
    blocks = model.layers // stages if even else math.ceil((model.layers + 2) / stages)
    ends = blocks if even else blocks - 1
    candidates = [(ends, embedding, stages, False), (blocks, 0, stages - 1, False),
                  (ends, embedding, 1, True)]
    return max((stage_memory(model, layout, software, *stage) for stage in candidates),
               key=lambda memory: memory.allocated)


def stage_memory(model: Transformer, layout: Layout, software: Software, blocks: int,
                 embedding: float, in_flight: float, is_last: bool) -> Memory:
    """Return the memory of a stage. in_flight: micro-batches whose activations it keeps."""
    tensor, stages, width = layout.tensor, layout.pipeline, model.width
    state = state_bytes((blocks * model.block_parameters + embedding) / tensor,
                        embedding / tensor, model.block_parameters / tensor, layout, software)
    saved = model.saved_bytes
    if software.flash:  # with sequence parallelism; one input of a block stays gathered
        saved = saved / tensor + (2 * width if tensor > 1 else 0)
        inputs = 2 * width / tensor
    else:
        saved += 5 * model.heads * model.context  # the scores: Korthikanti et al., equation 2
        saved = (saved - 10 * width) / tensor + 10 * width
        inputs = 2 * width
    kept = {"none": saved, "operations": inputs + 0.4 * (saved - inputs),
            "layers": (saved + inputs) / 2, "full": inputs}[layout.checkpointing]
    if layout.chunks > 1 and not is_last:
        in_flight += (stages - 1) / layout.chunks
    tokens = layout.micro_batch * model.context / layout.context
    activations = kept * tokens * blocks * min(in_flight, layout.micro_batches)
    recomputed = 0 if layout.checkpointing == "none" else saved * tokens  # one block's
    logits = LOGIT_BYTES * tokens * model.vocabulary / tensor if is_last else 0
    return Memory(state, activations, max(recomputed, logits))


def fits(memory: Memory, gpu: Gpu) -> str:
    """Return "no" if the allocator alone needs too much, "yes" if MEMORY_ERROR more would fit.

    Otherwise "perhaps".
    """
    if memory.reserved > gpu.memory:
        return "no"
    return "yes" if memory.in_use * (1 + MEMORY_ERROR) <= gpu.memory else "perhaps"
