"""Adam in Horovod's DistributedOptimizer."""
import horovod.torch as hvd
import torch
from habits import network, train


def main():
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, hvd.DistributedOptimizer(optimizer))


if __name__ == "__main__":
    main()
