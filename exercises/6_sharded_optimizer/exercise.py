"""Shard an optimizer's state.

ZeRO stage 1 by hand, for SGD with momentum. Each rank stores the momentum of one shard, updates
this shard, and gets the new parameters of the other shards from the other ranks.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import pad


class ShardedSGD:
    """SGD with momentum, whose state is sharded across ranks.

    Parameters are flattened into one vector, zero-padded to a multiple of N and split into N equal
    shards, one for each of the N ranks. Rank r has shard r.
    """

    def __init__(self, parameters, lr, momentum):
        self.parameters = list(parameters)
        self.lr, self.momentum = lr, momentum
        self.sizes = [parameter.numel() for parameter in self.parameters]
        rank, world_size = dist.get_rank(), dist.get_world_size()
        total = sum(self.sizes)
        # Your lines: self.begin and self.end. This rank's shard is flat[self.begin:self.end].
        raise NotImplementedError
        # Your line: self.velocity, zeros of the parameters' dtype, for this shard only.
        raise NotImplementedError

    def average(self, gradients):
        """Return this rank's shard of the mean over all ranks; `gradients` is a flat vector."""
        raise NotImplementedError  # your lines

    def update(self, parameter_shard, gradient_shard):
        """Update this rank's shard of the parameters in place.

        velocity = momentum * velocity + gradient; then parameter = parameter - lr * velocity.
        """
        raise NotImplementedError  # your lines

    def gather(self, parameter_shard):
        """Return the flat vector of new parameters: all ranks' shards, in rank order."""
        raise NotImplementedError  # your lines

    def step(self):
        gradients = self.flatten([parameter.grad for parameter in self.parameters])
        gradient_shard = self.average(gradients)
        parameters = self.flatten([parameter.data for parameter in self.parameters])
        parameter_shard = parameters[self.begin:self.end].clone()
        self.update(parameter_shard, gradient_shard)
        flat = self.gather(parameter_shard)
        for parameter, part in zip(self.parameters, flat[:sum(self.sizes)].split(self.sizes)):
            parameter.data.copy_(part.view_as(parameter))

    def flatten(self, tensors):
        """Return the tensors as one vector, padded with zeros to N equal shards."""
        numbers = torch.cat([tensor.flatten() for tensor in tensors])
        length = (self.end - self.begin) * dist.get_world_size()
        return pad(numbers, (0, length - len(numbers)))
