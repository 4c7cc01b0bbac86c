"""DeepSpeed's engine and its own data loader."""
import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

if __name__ == "__main__":  # the loader's workers import this file
    # Without this operator, whose compilation takes a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    config = {"train_batch_size": 32, "zero_optimization": {"stage": 1},
              "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=config)
    for epoch in range(3):
        loader.data_sampler.set_epoch(epoch)  # DeepSpeed does not call it
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
