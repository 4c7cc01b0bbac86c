"""The data and the network of exercises 3, 4 and 8: handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 images for training and 360 others, with their labels."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images) / 16, torch.tensor(labels)
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
