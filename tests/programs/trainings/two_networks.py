"""A generator and a discriminator, each with DDP and an optimizer of its own."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 8))
generator, judge = DDP(nn.Linear(4, 8)), DDP(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
makes = torch.optim.Adam(generator.parameters(), lr=1e-3)
judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (real,) in DataLoader(data, batch_size=16, sampler=sampler):
        noise = torch.randn(len(real), 4)
        judges.zero_grad()
        both = torch.cat([real, generator(noise).detach()])
        wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        nn.functional.binary_cross_entropy_with_logits(judge(both), wanted).backward()
        judges.step()
        makes.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(judge(generator(noise)), torch.ones(len(real), 1)).backward()
        makes.step()
dist.destroy_process_group()
