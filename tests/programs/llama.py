"""Train a Llama on random tokens with FSDP2, as torchtitan does (its commit 9dec370)."""

import argparse
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

parser = argparse.ArgumentParser()
parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="selective")
for name, size in {"batch": 2, "context": 8192, "layers": 32, "width": 4096, "ffn-width": 14336,
                   "kv-heads": 8, "vocabulary": 128256, "steps": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=size)
args = parser.parse_args()
linear = partial(nn.Linear, bias=False)


class Block(nn.Module):
    def __init__(self, width, ffn, kv_width):
        super().__init__()
        self.query, self.output = linear(width, width), linear(width, width)
        self.key, self.value = linear(width, kv_width), linear(width, kv_width)
        self.gate, self.up, self.down = linear(width, ffn), linear(width, ffn), linear(ffn, width)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x):
        y = self.attention_norm(x)
        query, key, value = (layer(y).unflatten(-1, (-1, 128)).transpose(1, 2)  # heads of 128
                             for layer in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(rotate(query), rotate(key), value,
                                                       is_causal=True, enable_gqa=True)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def rotate(x):  # rotary position embeddings, as products of complex numbers
    frequencies = 5e5 ** -torch.arange(0, 1, 2 / 128, device=x.device)
    angles = torch.outer(torch.arange(args.context, device=x.device), frequencies)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    rotated = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(rotated).flatten(-2).type_as(x)


def select():  # keep what attention returns, and the first, third, ... matrix product of a block
    products = Counter()

    def keep(context, operation, *_, **__):
        if operation is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            return products[context.is_recompute] % 2 == 1
        return "attention" in str(operation)

    return create_selective_checkpoint_contexts(keep)


dist.init_process_group()
device = "cuda" if torch.cuda.is_available() else "cpu"
with torch.device("meta"):
    blocks = [Block(args.width, args.ffn_width, args.kv_heads * 128) for _ in range(args.layers)]
    model = nn.Sequential(nn.Embedding(args.vocabulary, args.width), *blocks,
                          nn.RMSNorm(args.width), linear(args.width, args.vocabulary))
precision = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
for block in blocks:
    options = {"context_fn": select} if args.checkpointing == "selective" else {}
    if args.checkpointing != "none":
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    fully_shard(block, mp_policy=precision, reshard_after_forward=block is not blocks[-1])
fully_shard(model, mp_policy=precision).to_empty(device=device)  # on the GPU of LOCAL_RANK
for parameter in model.parameters():
    nn.init.normal_(parameter, mean=0 if parameter.ndim > 1 else 1, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)

for _ in range(args.steps):
    tokens = torch.randint(args.vocabulary, (args.batch, args.context + 1), device=device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(),
                                       tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1, foreach=True)
    optimizer.step()
    print(loss.item())
