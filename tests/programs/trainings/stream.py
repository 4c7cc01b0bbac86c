"""An IterableDataset of which each rank takes its share, and a learning-rate schedule."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks

    def __iter__(self):
        for number in range(self.rank, 512, self.ranks):
            generator = torch.Generator().manual_seed(number)
            yield torch.randn(8, generator=generator), torch.randn(1, generator=generator)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
for inputs, targets in DataLoader(Stream(dist.get_rank(), dist.get_world_size()), batch_size=16):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    schedule.step()
dist.destroy_process_group()
