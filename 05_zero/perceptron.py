"""The network of this chapter's programs: linear layers alone, whose bytes are easy to count."""

import torch
from torch import nn


class Layer(nn.Linear):
    def reset_parameters(self):  # called when a layer is made
        super().reset_parameters()
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")


def build_model(width: int, layers: int, images: torch.Tensor) -> nn.Sequential:
    """Return a perceptron whose layers between the first and the last are equal."""
    model, inputs = nn.Sequential(nn.Flatten()), images[0].numel()
    for _ in range(layers + 1):
        model.extend([Layer(inputs, width), nn.ReLU()])
        inputs = width
    return model.append(nn.Linear(width, 10))
