"""A transformer: its parameters and floating-point operations (FLOPs), its layout, its software."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Transformer:
    """A decoder of equal blocks, as GPT (two matrices in a block's MLP) or Llama (gated: three).

    kv_heads: heads of keys and values, if fewer than heads; ffn: width of the MLP, 4 x width
    unless given; tied: embedding and output layer are one matrix. Sizes are numbers of elements.
    Biases and normalizations are left out: below 0.1 %.
    """
    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    tied: bool = False

    @property
    def kv_share(self) -> float:
        return (self.kv_heads or self.heads) / self.heads

    @property
    def mlp_width(self) -> int:
        return self.ffn or 4 * self.width

    @property
    def block_parameters(self) -> float:
        attention = (2 + 2 * self.kv_share) * self.width**2
        return attention + (3 if self.gated else 2) * self.width * self.mlp_width

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def parameters(self) -> float:
        return (self.layers * self.block_parameters
                + (1 if self.tied else 2) * self.embedding_parameters)

    @property
    def matmul_flops(self) -> float:
        """FLOPs per token in forward: 2 per parameter of a matrix; the embedding is looked up."""
        return 2 * (self.layers * self.block_parameters + self.embedding_parameters)

    @property
    def attention_flops(self) -> float:
        """FLOPs per token in forward: a token sees half of the context, 2 x 2 x width each."""
        return 2 * self.layers * self.width * self.context

    @property
    def flops(self) -> float:
        """FLOPs per token of a step without recomputation: backward has twice those of forward."""
        return 3 * (self.matmul_flops + self.attention_flops)

    @property
    def saved_bytes(self) -> float:
        """Bytes per token that a block's forward keeps for its backward, in bf16.

        GPT: 34 x width with dropout (Korthikanti et al., 2205.05198, equation 1, without the
        scores, which FlashAttention does not keep). Llama: the inputs of its matrix products,
        normalizations and products, 2 bytes each.
        """
        if self.gated:
            return (12 + 4 * self.kv_share) * self.width + 8 * self.mlp_width
        return 18 * self.width + 4 * self.mlp_width


@dataclass(frozen=True)
class Layout:
    """How a transformer is spread over data x context x tensor x pipeline GPUs.

    zero: what the data-parallel GPUs shard, 0 (DDP), 1 (optimizer state), 2 (also gradients) or 3
    (FSDP); replicas: groups that shard apart (HSDP), each as large as data / replicas. Ranks next
    to each other share a tensor, then the context, the data, and last the pipeline.
    micro_batch: sequences; micro_batches: of a step; chunks: stages of a rank (interleaved).
    checkpointing: "none", "operations" (every second product), "layers" (every second) or "full".
    """
    data: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 3
    replicas: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    chunks: int = 1
    checkpointing: str = "none"

    @property
    def gpus(self) -> int:
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def sequences(self) -> int:
        """Sequences of a step, on all GPUs."""
        return self.data * self.micro_batch * self.micro_batches


def kind_of(layout: Layout) -> str:
    """Return what layouts have in common that differ in numbers only, such as "FSDP + tensor"."""
    kind = ["HSDP" if layout.replicas > 1 else ("DDP", "ZeRO-1", "ZeRO-2", "FSDP")[layout.zero]]
    kind += [name for name in ("tensor", "context", "pipeline") if getattr(layout, name) > 1]
    return " + ".join(kind)


@dataclass(frozen=True)
class Software:
    """What runs a transformer. flash: FlashAttention and sequence parallelism with tensors.

    gradient_bytes: per element that is reduced. overlap: computation hides tensor parallelism.
    """
    flash: bool = True
    compiled: bool = False
    float8: bool = False
    overlap: bool = False
    gradient_bytes: int = 4


PYTORCH = Software()
