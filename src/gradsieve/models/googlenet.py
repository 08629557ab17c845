"""GoogLeNet (Szegedy et al., 2015) for images of 32 x 32.

With batch normalisation, a stem of one convolution, two 3 x 3 convolutions for a 5 x 5 and no auxiliary classifiers.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn

from gradsieve.models.layers import activated, pooled_classifier

_convolution = partial(activated, bias=True)


class Inception(nn.Module):
    """Four branches side by side; `narrow3` and `narrow5` are the channels ahead of the large filters."""

    def __init__(self, inputs: int, one: int, narrow3: int, three: int, narrow5: int, five: int, pooled: int) -> None:
        super().__init__()
        self.one = _convolution(inputs, one, 1)
        self.three = nn.Sequential(_convolution(inputs, narrow3, 1), _convolution(narrow3, three))
        self.five = nn.Sequential(
            _convolution(inputs, narrow5, 1), _convolution(narrow5, five), _convolution(five, five)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _convolution(inputs, pooled, 1))

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.one(images), self.three(images), self.five(images), self.pooled(images)], dim=1)


def _halve() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, padding=1)


def googlenet(num_classes: int = 10) -> nn.Module:
    stage3 = nn.Sequential(
        Inception(192, 64, 96, 128, 16, 32, 32),
        Inception(256, 128, 128, 192, 32, 96, 64),
    )
    stage4 = nn.Sequential(
        Inception(480, 192, 96, 208, 16, 48, 64),
        Inception(512, 160, 112, 224, 24, 64, 64),
        Inception(512, 128, 128, 256, 24, 64, 64),
        Inception(512, 112, 144, 288, 32, 64, 64),
        Inception(528, 256, 160, 320, 32, 128, 128),
    )
    stage5 = nn.Sequential(
        Inception(832, 256, 160, 320, 32, 128, 128),
        Inception(832, 384, 192, 384, 48, 128, 128),
    )
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            stem=_convolution(3, 192),
            stage3=stage3,
            halve3=_halve(),
            stage4=stage4,
            halve4=_halve(),
            stage5=stage5,
            classifier=pooled_classifier(1024, num_classes),
        )
    )
