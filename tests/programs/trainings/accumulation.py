"""Four micro-batches per step, all-reduced with the last one; clipping, dropout, BatchNorm."""
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO_BATCHES = 4
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(1024, 8), torch.randn(1024, 1))
model = nn.Sequential(
    nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
ddp = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(DataLoader(data, batch_size=16, sampler=sampler)):
        last = number % MICRO_BATCHES == MICRO_BATCHES - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            (nn.functional.mse_loss(ddp(inputs), targets) / MICRO_BATCHES).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
