"""GoogLeNet (Szegedy et al., 2015) for images of 32 x 32.

With batch normalisation, a stem of one convolution, two 3 x 3 convolutions for a 5 x 5 and no auxiliary classifiers.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn

from gradsieve.models.layers import activated, pooled_classifier

STEM = 192
STAGES = {
    3: ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    4: (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    5: ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
}
"""Channels of each block's branches, in the order that `Inception` takes them."""
SHARED = 8
"""All of them are multiples of it."""

_convolution = partial(activated, bias=True)


class Inception(nn.Module):
    """Four branches side by side; `narrow3` and `narrow5` are the channels ahead of the large filters."""

    def __init__(self, inputs: int, one: int, narrow3: int, three: int, narrow5: int, five: int, pooled: int) -> None:
        super().__init__()
        self.channels = one + three + five + pooled
        self.one = _convolution(inputs, one, 1)
        self.three = nn.Sequential(_convolution(inputs, narrow3, 1), _convolution(narrow3, three))
        self.five = nn.Sequential(
            _convolution(inputs, narrow5, 1), _convolution(narrow5, five), _convolution(five, five)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _convolution(inputs, pooled, 1))

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.one(images), self.three(images), self.five(images), self.pooled(images)], dim=1)


def googlenet(num_classes: int = 10, width: int = STEM) -> nn.Module:
    """`width` is that of the stem, and all others keep their proportion to it: 48 makes a network for a CPU."""
    least = STEM // SHARED
    if width < least or width % least:
        raise ValueError(f"width must be a multiple of {least}, so that every branch has whole channels: not {width}")
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=_convolution(3, width))
    channels = width
    for number, stage in STAGES.items():
        blocks = []
        for branches in stage:
            blocks.append(Inception(channels, *(part * width // STEM for part in branches)))
            channels = blocks[-1].channels
        if number > min(STAGES):
            parts[f"halve{number - 1}"] = nn.MaxPool2d(3, stride=2, padding=1)
        parts[f"stage{number}"] = nn.Sequential(*blocks)
    parts["classifier"] = pooled_classifier(channels, num_classes)
    return nn.Sequential(parts)
