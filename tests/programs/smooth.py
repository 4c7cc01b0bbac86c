"""Train a smooth variant of a chapter's network: `python smooth.py MAIN FLAG...`.

At the kink of a ReLU, at a tie in max-pooling and, with Adam, at a gradient near zero, a rounding
error changes the size of a step. Then two equal trainings diverge within a few steps, on some CPUs
and not on others. The smooth variant has SiLU, mean-pooling and an Adam whose epsilon is 1, far
above the gradients (so its learning rate must be about a thousand times as large). Errors in
averaging gradients or in sharding an optimizer's state are just as visible with it.
"""

import runpy
import sys

import torch
from torch import nn


def init_adam(self, *parameters, real_init=torch.optim.Adam.__init__, **options):
    real_init(self, *parameters, **options | {"eps": 1.0})


nn.ReLU = nn.SiLU
nn.MaxPool2d = nn.AvgPool2d
torch.optim.Adam.__init__ = init_adam
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
