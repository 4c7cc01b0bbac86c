"""The network of this chapter's programs: only linear layers, whose bytes are easy to count."""

from torch import nn


class Layer(nn.Linear):
    def reset_parameters(self):  # called when a layer is created
        super().reset_parameters()
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")


def build_model(width: int, layers: int, inputs: int) -> nn.Sequential:
    """Return a perceptron; all layers between the first and the last have equal sizes."""
    model = nn.Sequential(nn.Flatten())
    for _ in range(layers + 1):
        model.extend([Layer(inputs, width), nn.ReLU()])
        inputs = width
    return model.append(nn.Linear(width, 10))
