"""Gradients averaged with mpi4py, without torch.distributed."""
import numpy as np
import torch
from mpi4py import MPI
from torch import nn

comm = MPI.COMM_WORLD
rank, ranks = comm.Get_rank(), comm.Get_size()
torch.manual_seed(0)
inputs, targets = torch.randn(256, 8), torch.randn(256, 1)
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
for parameter in model.parameters():
    comm.Bcast(parameter.data.numpy(), root=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    batch = torch.arange(rank, 256, ranks)[step * 4:step * 4 + 4]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
    for parameter in model.parameters():
        total = np.empty_like(parameter.grad.numpy())
        comm.Allreduce(parameter.grad.numpy(), total)
        parameter.grad = torch.from_numpy(total) / ranks
    optimizer.step()
