"""What the image networks share."""

from __future__ import annotations

from torch import nn


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps the size of the image but for the stride, with Kaiming initialisation."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def normalised(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, bias: bool = False) -> nn.Sequential:
    """A convolution and batch normalisation."""
    return nn.Sequential(convolution(inputs, outputs, kernel, stride, bias=bias), nn.BatchNorm2d(outputs))


def activated(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, bias: bool = False) -> nn.Sequential:
    """A convolution, batch normalisation and ReLU."""
    return nn.Sequential(*normalised(inputs, outputs, kernel, stride, bias=bias), nn.ReLU(inplace=True))


def pooled_classifier(features: int, num_classes: int) -> nn.Sequential:
    """The mean over the image, and one linear layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, num_classes))
