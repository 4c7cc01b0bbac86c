"""A transformer's parameters and floating-point operations (FLOPs)."""

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
