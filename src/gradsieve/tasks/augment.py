"""Random changes to a batch: few operations, on its device, none of which waits for the host."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def whole_below(uniform: Tensor, limit: int) -> Tensor:
    """Whole numbers in [0, limit), from numbers in (0, 1)."""
    # the limit itself never comes up: up to 2**24 the product with the largest float32 below 1 rounds down
    return (uniform * limit).long()


def cropped(images: Tensor, padding: int, corners: Tensor, mirror: Tensor) -> Tensor:
    """A window of the images' own size out of each, after a border of `padding` blank pixels was put around it.

    `corners` is the row and column where each window starts; where `mirror` is true its columns run backwards.
    """
    count, channels, height, width = images.shape
    device = images.device
    padded = functional.pad(images, (padding,) * 4)
    rows = corners[:, :1] + torch.arange(height, device=device)
    columns = corners[:, 1:] + torch.arange(width, device=device)
    columns = torch.where(mirror[:, None], columns.flip(1), columns)
    example = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[:, None, None]
    return padded[example, channel, rows[:, None, :, None], columns[:, None, None, :]]
