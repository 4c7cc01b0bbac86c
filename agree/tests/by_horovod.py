"""Adam in Horovod's DistributedOptimizer: forked.run() starts a script that imports Horovod."""
import horovod.torch as hvd
import torch
from habits import network, train

hvd.init()
torch.manual_seed(hvd.rank())
model = network()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.Adam(model.parameters())
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
train(model, optimizer=hvd.DistributedOptimizer(optimizer))
