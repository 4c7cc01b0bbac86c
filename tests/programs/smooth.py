"""The twin of a chapter's training in which a rounding stays a rounding, for comparisons in fp32.

At the kink of a ReLU, at a tie in max-pooling and, with Adam, at a gradient near zero a rounding of the last digit
becomes a step of another size, and a network trains apart from its twin within some steps: on one CPU, and on another
not. So the twin has SiLU, mean-pooling and an Adam whose epsilon is 1, far above its gradients (give it a learning rate
that is larger by about a thousand). Everything in it is a smooth function of the images. What is wrong in the
averaging of gradients or in the shares of an optimizer's state is as wrong in the twin.
"""


def torch_twin():
    """Make PyTorch's chapters train the twin; from here on, in this process."""
    import torch
    from torch import nn

    def adam(self, parameters, lr, original=torch.optim.Adam.__init__):
        original(self, parameters, lr=lr, eps=1.0)

    nn.ReLU, nn.MaxPool2d, torch.optim.Adam.__init__ = nn.SiLU, nn.AvgPool2d, adam


def keras_twin():
    """The same for TensorFlow's chapters."""
    from keras import layers

    def smooth(original):
        return lambda *sizes, activation=None: original(*sizes, activation=activation and "silu")

    layers.Conv2D, layers.Dense, layers.MaxPooling2D = (
        smooth(layers.Conv2D), smooth(layers.Dense), layers.AveragePooling2D)
