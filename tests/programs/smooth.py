"""Train a chapter's network without kinks: `python smooth.py [reversed] MAIN FLAG...`.

At the kink of a ReLU, at a tie in max-pooling and, with Adam, at a gradient near zero, a rounding
error changes a step's size, and within a few steps two equal trainings diverge, on some CPUs and
not on others. This variant has SiLU, mean-pooling and an Adam whose epsilon is 1, far above its
gradients (give it a learning rate about a thousand times as large). An error in averaging gradients
or in sharding an optimizer's state shows here just as well.

reversed: the images in each batch are in reverse order, so that the sums round differently.
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


nn.ReLU = nn.SiLU
nn.MaxPool2d = nn.AvgPool2d
torch.optim.Adam.__init__ = adam
del sys.argv[0]
if sys.argv[0] == "reversed":
    DataLoader.__iter__ = reversed_batches
    del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
