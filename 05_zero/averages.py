"""A check that costs milliseconds: does FSDP average the ranks' gradients here?

Over gloo PyTorch 2.8.0 sums them (github.com/pytorch/pytorch/issues/162338). Adam divides a
gradient by its own size, so a training with gradients N times too large looks right.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp


def refuse_sums(device: object) -> None:
    """Exit with one line where each rank's gradient of 1 does not come back as a mean of 1."""
    layer = nn.Linear(1, 1, bias=False).to(device)
    fsdp.fully_shard(layer)
    layer(torch.ones(1, 1, device=device)).sum().backward()
    times = layer.weight.grad.full_tensor().item()
    if round(times) != 1:  # a mean over 7 ranks may be 0.9999999
        sys.exit(f"FSDP of PyTorch {torch.__version__} makes gradients {times:g} times as large as "
                 f"the mean over {dist.get_world_size()} ranks: take another PyTorch, or NCCL "
                 "(github.com/pytorch/pytorch/issues/162338)")
