"""VGG (Simonyan & Zisserman, 2015) for images of 32 x 32, with batch normalisation and one linear layer."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from gradsieve.models.layers import activated, pooled_classifier

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(num_classes: int = 10) -> nn.Module:
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for number, widths in enumerate(STAGES, start=1):
        layers: list[nn.Module] = []
        for width in widths:
            layers.append(activated(channels, width, bias=True))
            channels = width
        parts[f"stage{number}"] = nn.Sequential(*layers, nn.MaxPool2d(2))
    parts["classifier"] = pooled_classifier(channels, num_classes)
    return nn.Sequential(parts)
