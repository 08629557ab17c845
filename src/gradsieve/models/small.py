"""Networks for handwritten digits of 8 x 8, given as rows of 64 numbers."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from gradsieve.models.layers import activated, pooled_classifier


def mlp(inputs: int = 64, hidden: int = 1024, layers: int = 2, num_classes: int = 10) -> nn.Module:
    """`layers` hidden layers of width `hidden`."""
    parts: list[nn.Module] = []
    for narrow, wide in pairwise([inputs, *[hidden] * layers]):
        parts += [nn.Linear(narrow, wide), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.Linear(hidden if layers else inputs, num_classes))


def cnn(num_classes: int = 10) -> nn.Module:
    """Four convolutions, the last two at half the size."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        activated(1, 64),
        activated(64, 128),
        nn.MaxPool2d(2),
        activated(128, 256),
        activated(256, 256),
        pooled_classifier(256, num_classes),
    )
