"""AlexNet (Krizhevsky et al., 2012) for images of 32 x 32: filters of 3 x 3 and pools of 2 x 2."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from gradsieve.models.layers import convolution

HIDDEN = 4096


def _active(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(convolution(inputs, outputs, stride=stride, bias=True), nn.ReLU(inplace=True))


def _features() -> nn.Sequential:
    return nn.Sequential(
        _active(3, 64, stride=2),
        nn.MaxPool2d(2),
        _active(64, 192),
        nn.MaxPool2d(2),
        _active(192, 384),
        _active(384, 256),
        _active(256, 256),
        nn.MaxPool2d(2),
    )


def _classifier(inputs: int, num_classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(inputs, HIDDEN),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(inplace=True),
        nn.Linear(HIDDEN, num_classes),
    )


def alexnet(num_classes: int = 10, dropout: float = 0.5) -> nn.Module:
    features, classifier = _features(), _classifier(256 * 2 * 2, num_classes, dropout)
    return nn.Sequential(OrderedDict[str, nn.Module](features=features, classifier=classifier))
