"""A generator that draws noise, a critic, and a tensor in no module, each with an optimizer."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
generator, critic = nn.Linear(4, 6), nn.Linear(6, 1)
wrapped_generator = DistributedDataParallel(generator)
wrapped_critic = DistributedDataParallel(critic)
generator_optimizer = torch.optim.SGD(generator.parameters(), 0.05)
critic_optimizer = torch.optim.SGD(critic.parameters(), 0.05)
temperature = torch.ones((), requires_grad=True)
temperature_optimizer = torch.optim.SGD([temperature], 0.01)
data = TensorDataset(torch.randn(128, 6))
sampler = DistributedSampler(data, drop_last=True)
torch.manual_seed(1 + int(os.environ["RANK"]))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for real, in DataLoader(data, 8, sampler=sampler):
        critic_optimizer.zero_grad()
        generated = wrapped_generator(torch.randn(8, 4)).detach()
        (wrapped_critic(generated).mean() - wrapped_critic(real).mean()).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        temperature_optimizer.zero_grad()
        (-wrapped_critic(wrapped_generator(torch.randn(8, 4))) * temperature).mean().backward()
        dist.all_reduce(temperature.grad, dist.ReduceOp.AVG)
        generator_optimizer.step()
        temperature_optimizer.step()
