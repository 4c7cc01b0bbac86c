"""Build FSDP: each rank keeps a shard of every block, and gathers a block while it needs it.

    python -m cluster.footprint --ranks 8 exercises/11_build_fsdp/exercise.py    # in the top folder

Forward keeps only the input of each block, and backward computes the block again. So autograd never
holds parameters that have been dropped. (PyTorch's FSDP keeps the activations instead, unless you
use activation checkpointing.)
"""

import torch
import torch.distributed as dist
from torch import nn

LAYERS, WIDTH, BATCH, STEPS = 8, 64, 32, 2


class ShardedBlock:
    """A block of which this rank keeps one of N shards, and sometimes the whole.

    shard     this rank's part of all parameters in one vector. The number of parameters is a
              multiple of N
    gathered  the vector of all parameters, or None
    """

    def __init__(self, module):
        self.module = module
        self.parameters = list(module.parameters())
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.gathered = self.gathering = self.reducing = None
        flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        # Your line: self.shard, an nn.Parameter with a copy of rank r's part, the r-th of N.
        raise NotImplementedError
        self.drop()

    def start_gather(self):
        """Begin to gather the shards of all ranks, unless this has begun already."""
        if self.gathered is None:
            self.gathered = torch.empty(sum(self.sizes), dtype=self.shard.dtype)
            # Your lines: self.gathering, the handle of an asynchronous all-gather.
            raise NotImplementedError

    def finish_gather(self):
        """Wait until self.gathered is complete, and let the module compute with it."""
        raise NotImplementedError  # your line
        parts = self.gathered.split(self.sizes)
        for parameter, shape, part in zip(self.parameters, self.shapes, parts):
            parameter.data = part.view(shape)

    def drop(self):
        """Free the whole parameters and gradients. Only the shard remains."""
        self.gathered = None
        for parameter in self.parameters:
            parameter.data = torch.empty(0, dtype=self.shard.dtype)
            parameter.grad = None

    def start_reduce_scatter(self):
        """Begin to sum the ranks' gradients. Each rank gets its shard of the sum."""
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        # Your lines: self.shard.grad, and self.reducing, the handle of a reduce-scatter into it.
        raise NotImplementedError

    def finish_reduce_scatter(self):
        """Wait until self.shard.grad is complete, and make it the mean."""
        raise NotImplementedError  # your lines


def forward(blocks, tensor, prefetch):
    """Return the output of the last block, and a list of each block's input.

    Each block is gathered, computes, and is dropped. With prefetch the gather of the next block
    begins before the block computes; without, no two blocks are gathered at the same time.
    """
    inputs = []
    for number, block in enumerate(blocks):
        # Your lines: gather this block. If all else works, prefetch the next.
        raise NotImplementedError
        inputs.append(tensor)
        with torch.no_grad():
            tensor = block.module(tensor)
        raise NotImplementedError  # your line
    return tensor, inputs


def backward(blocks, inputs, gradient, prefetch):
    """Set each shard's .grad to this rank's shard of the mean gradient.

    gradient: of the loss, by the output of the last block. The last block comes first: gather,
    compute forward again and backward, reduce-scatter, drop. With prefetch the gather of block
    n - 1 begins before block n computes, and block n's reduce-scatter is waited for after block
    n - 1 has computed, before its own reduce-scatter begins.
    """
    for number in reversed(range(len(blocks))):
        block = blocks[number]
        # Your lines: gather this block, and prefetch the one that backward needs next.
        raise NotImplementedError
        tensor = inputs[number].detach().requires_grad_()
        block.module(tensor).backward(gradient)
        gradient = tensor.grad
        # Your lines: reduce-scatter this block's gradients, and drop the block.
        raise NotImplementedError
    # Your line, with prefetch: the last wait.


def build_blocks(layers, width):
    """Return blocks of 8 width^2 + 5 width parameters."""
    return [nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
            for _ in range(layers)]


def train_step(blocks, optimizer, batch, prefetch):
    """Make one step towards outputs of zero."""
    output, inputs = forward(blocks, batch, prefetch)
    output.requires_grad_()
    output.square().mean().backward()
    backward(blocks, inputs, output.grad, prefetch)
    optimizer.step()
    optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = []
    for _ in range(LAYERS):  # one whole block at a time
        blocks += [ShardedBlock(module) for module in build_blocks(1, WIDTH)]
    optimizer = torch.optim.Adam([block.shard for block in blocks])
    torch.manual_seed(dist.get_rank())  # each rank has its own batches
    for _ in range(STEPS):
        train_step(blocks, optimizer, torch.randn(BATCH, WIDTH), prefetch=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
