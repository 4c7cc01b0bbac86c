"""Train a chapter's network without kinks: `python smooth.py [reversed] MAIN FLAG...`.

At the kink of a ReLU, at a tie in max-pooling and, with Adam, at a gradient near zero, a rounding
of the last digit becomes a step of another size, and a network trains apart from its twin within
some steps: on one CPU, and on another not. Here it has SiLU, mean-pooling and an Adam whose epsilon
is 1, far above its gradients (give it a learning rate that is larger by about a thousand). What is
wrong in the averaging of gradients or in the shares of an optimizer's state is as wrong here.

reversed: the images in each batch in the opposite order, so that the sums round otherwise.
"""

import runpy
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader


def adam(self, *parameters, original=torch.optim.Adam.__init__, **options):
    original(self, *parameters, **options | {"eps": 1.0})


def reversed_batches(loader, original=DataLoader.__iter__):
    for batch in original(loader):
        yield [part.flip(0) for part in batch]


nn.ReLU, nn.MaxPool2d, torch.optim.Adam.__init__ = nn.SiLU, nn.AvgPool2d, adam
del sys.argv[0]
if sys.argv[0] == "reversed":
    DataLoader.__iter__ = reversed_batches
    del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
