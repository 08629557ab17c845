"""A pre-activation residual network with squeeze-and-excitation (Hu et al., 2018) for images of 32 x 32."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from gradsieve.models.layers import activated, convolution, pooled_classifier

WIDENING = (1, 2, 4, 8)
REDUCTION = 16


class Gate(nn.Module):
    """Weighs the channels by what they hold on average."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, channels // REDUCTION, 1)
        self.excite = nn.Conv2d(channels // REDUCTION, channels, 1)

    def forward(self, images: Tensor) -> Tensor:
        means = functional.adaptive_avg_pool2d(images, 1)
        weights: Tensor = self.excite(functional.relu(self.squeeze(means)))
        return images * weights.sigmoid()


class GatedBlock(nn.Module):
    """A pre-activation block with a gate at its end."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.activation = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))
        self.branch = nn.Sequential(
            activated(inputs, outputs, stride=stride), convolution(outputs, outputs), Gate(outputs)
        )
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = None if same_shape else convolution(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        active: Tensor = self.activation(images)
        branch: Tensor = self.branch(active)
        return branch + (images if self.shortcut is None else self.shortcut(active))


def senet18(num_classes: int = 10, width: int = 64) -> nn.Module:
    """`width` is that of the first stage: 16 makes a network of a sixteenth of the entries, which trains on a CPU."""
    if width < REDUCTION:
        raise ValueError(f"width must be at least {REDUCTION}, channels that a gate squeezes into one: not {width}")
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=activated(3, width))
    channels = width
    for number, widening in enumerate(WIDENING, start=1):
        outputs = width * widening
        first = GatedBlock(channels, outputs, 1 if number == 1 else 2)
        parts[f"stage{number}"] = nn.Sequential(first, GatedBlock(outputs, outputs, 1))
        channels = outputs
    parts["classifier"] = pooled_classifier(channels, num_classes)
    return nn.Sequential(parts)
