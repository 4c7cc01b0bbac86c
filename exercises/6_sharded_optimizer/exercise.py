"""Shard an optimizer's state.

ZeRO's stage 1 by hand, for SGD with momentum: each rank keeps the momentum of its share alone,
steps that share, and gets the other shares' new parameters from the other ranks.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import pad


class ShardedSGD:
    """SGD with momentum, whose state is shared out among the ranks.

    For its arithmetic it lays all parameters end to end in one row. The row is cut into N shards
    for the N ranks, all equally long: zeros at its end fill up the last one. Shard r is rank r's.
    """

    def __init__(self, parameters, lr, momentum):
        self.parameters = list(parameters)
        self.lr, self.momentum = lr, momentum
        self.sizes = [parameter.numel() for parameter in self.parameters]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        total = sum(self.sizes)
        # Your lines: self.begin and self.end. This rank's shard is row[self.begin:self.end].
        raise NotImplementedError
        # Your line: self.velocity, zeros of the parameters' dtype, for this shard alone.
        raise NotImplementedError

    def average(self, gradients):
        """Return this rank's shard of the mean of all ranks' `gradients`, whole rows."""
        raise NotImplementedError  # your lines

    def update(self, own, gradient):
        """Change `own`, this rank's shard of the parameters, in place; `gradient` is of this shard.

        velocity = momentum * velocity + gradient; then parameter = parameter - lr * velocity.
        """
        raise NotImplementedError  # your lines

    def gather(self, own):
        """Return the whole row of new parameters: the shards `own` of all ranks, in their order."""
        raise NotImplementedError  # your lines

    def step(self):
        gradient = self.average(self.row([parameter.grad for parameter in self.parameters]))
        parameters = self.row([parameter.data for parameter in self.parameters])
        own = parameters[self.begin:self.end].clone()
        self.update(own, gradient)
        row = self.gather(own)
        for parameter, part in zip(self.parameters, row[:sum(self.sizes)].split(self.sizes)):
            parameter.data.copy_(part.view_as(parameter))

    def row(self, tensors):
        """Return the numbers of these tensors end to end, and zeros until all shards are full."""
        numbers = torch.cat([tensor.flatten() for tensor in tensors])
        length = (self.end - self.begin) * dist.get_world_size()
        return pad(numbers, (0, length - len(numbers)))
