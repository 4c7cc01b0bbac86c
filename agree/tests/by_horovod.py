"""Adam in Horovod's DistributedOptimizer, or alone: by_horovod.py FUNCTION."""
import sys

import horovod.torch as hvd
import torch
from habits import network, train


def by_horovod(wrap=hvd.DistributedOptimizer):
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, wrap(optimizer))


if __name__ == "__main__":
    by_horovod(*[lambda optimizer: optimizer] * (sys.argv[1] == "unwrapped"))
