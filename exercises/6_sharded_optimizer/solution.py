"""Shard an optimizer's state: a solution."""

import torch
import torch.distributed as dist
from torch.nn.functional import pad


class ShardedSGD:
    def __init__(self, parameters, lr, momentum):
        self.parameters = list(parameters)
        self.lr, self.momentum = lr, momentum
        self.sizes = [parameter.numel() for parameter in self.parameters]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        total = sum(self.sizes)
        length = -(-total // ranks)  # rounded up
        self.begin = rank * length
        self.end = self.begin + length
        self.velocity = torch.zeros(length, dtype=self.parameters[0].dtype)

    def average(self, gradients):
        shard = torch.empty(self.end - self.begin, dtype=gradients.dtype)
        dist.reduce_scatter(shard, list(gradients.chunk(dist.get_world_size())))
        return shard / dist.get_world_size()

    def update(self, own, gradient):
        self.velocity = self.momentum * self.velocity + gradient
        own -= self.lr * self.velocity

    def gather(self, own):
        shards = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, own)
        return torch.cat(shards)

    def step(self):
        gradient = self.average(self.row([parameter.grad for parameter in self.parameters]))
        parameters = self.row([parameter.data for parameter in self.parameters])
        own = parameters[self.begin:self.end].clone()
        self.update(own, gradient)
        row = self.gather(own)
        for parameter, part in zip(self.parameters, row[:sum(self.sizes)].split(self.sizes)):
            parameter.data.copy_(part.view_as(parameter))

    def row(self, tensors):
        numbers = torch.cat([tensor.flatten() for tensor in tensors])
        length = (self.end - self.begin) * dist.get_world_size()
        return pad(numbers, (0, length - len(numbers)))
