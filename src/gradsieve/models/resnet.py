"""Residual networks (He et al., 2016) for images of 32 x 32: a 3 x 3 stem and no pooling before the first stage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional

from gradsieve.models.layers import activated, normalised, pooled_classifier

WIDENING = (1, 2, 4, 8)


class Residual(nn.Module):
    """A branch and a way around it."""

    def __init__(self, branch: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else normalised(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.branch(images) + self.shortcut(images))


def _basic(inputs: int, outputs: int, stride: int) -> Residual:
    branch = nn.Sequential(activated(inputs, outputs, stride=stride), normalised(outputs, outputs))
    return Residual(branch, inputs, outputs, stride)


def _bottleneck(inputs: int, outputs: int, stride: int) -> Residual:
    width = outputs // 4
    branch = nn.Sequential(
        activated(inputs, width, 1), activated(width, width, stride=stride), normalised(width, outputs, 1)
    )
    return Residual(branch, inputs, outputs, stride)


def _resnet(
    block: Callable[[int, int, int], Residual], expansion: int, depths: Sequence[int], num_classes: int, width: int = 64
) -> nn.Module:
    if width < 1:
        raise ValueError(f"width must be at least 1, not {width}")
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=activated(3, width))
    channels = width
    for number, (widening, depth) in enumerate(zip(WIDENING, depths, strict=True), start=1):
        outputs = width * widening * expansion
        first = block(channels, outputs, 1 if number == 1 else 2)
        parts[f"stage{number}"] = nn.Sequential(first, *(block(outputs, outputs, 1) for _ in range(depth - 1)))
        channels = outputs
    parts["classifier"] = pooled_classifier(channels, num_classes)
    return nn.Sequential(parts)


def resnet18(num_classes: int = 10, width: int = 64) -> nn.Module:
    """`width` is that of the first stage: 16 makes a network of a sixteenth of the entries, which trains on a CPU."""
    return _resnet(_basic, 1, (2, 2, 2, 2), num_classes, width)


def resnet50(num_classes: int = 10) -> nn.Module:
    return _resnet(_bottleneck, 4, (3, 4, 6, 3), num_classes)


def resnet152(num_classes: int = 10) -> nn.Module:
    return _resnet(_bottleneck, 4, (3, 8, 36, 3), num_classes)
