"""A small GPT, a decoder-only transformer: for each byte of a text it predicts the next byte.

Input: int64, (sequences, tokens); a token is a byte. Output: logits, (sequences, tokens, 256).
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


class Linear(nn.Linear):
    """A linear layer whose outputs have the size of its inputs, times `scale`."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0, bias: bool = True):
        super().__init__(inputs, outputs, bias)
        nn.init.normal_(self.weight, std=scale / inputs**0.5)
        if bias:
            nn.init.zeros_(self.bias)


class Embedding(nn.Module):
    """The sum of two vectors: one for a token's byte, one for its position in the sequence."""

    def __init__(self, width: int, context: int):
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)

    def forward(self, text):
        positions = torch.arange(text.shape[1], device=text.device)
        return self.byte(text) + self.position(positions)


class Attention(nn.Module):
    """Each token takes information from the tokens before it, and from itself."""

    def __init__(self, width: int, heads: int, scale: float):
        super().__init__()
        self.head_width = width // heads
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.output = Linear(width, width, scale)

    def forward(self, x):
        query, key, value = (  # each: (sequences, heads, tokens, head_width)
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value))
        attention = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attention.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a perceptron (MLP) for each token. Each adds its output to its input."""

    def __init__(self, width: int, heads: int, layers: int, checkpointing: bool):
        super().__init__()
        self.checkpointing = checkpointing
        scale = (2 * layers) ** -0.5  # the sum of all outputs does not grow with their number
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, scale)
        self.mlp = nn.Sequential(
            Linear(width, 4 * width), nn.GELU(), Linear(4 * width, width, scale))

    def forward(self, x):
        if self.checkpointing and self.training:  # keep only x; backward computes the rest again
            return checkpoint(self.add_outputs, x, use_reentrant=False)
        return self.add_outputs(x)

    def add_outputs(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def parts(layers: int, width: int, heads: int, context: int,
          checkpointing: bool = False) -> Iterator[nn.Module]:
    """Yield the model's parts in order; each is created when the caller asks for it."""
    yield Embedding(width, context)
    for _ in range(layers):
        yield Block(width, heads, layers, checkpointing)
    yield nn.Sequential(nn.LayerNorm(width), Linear(width, 256, scale=0.1, bias=False))  # the head
